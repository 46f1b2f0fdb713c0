"""What garbage collection may not delete: what builds read, and what kept outputs need."""

from __future__ import annotations

import json
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from pipeline import Artifact, Experiment, Result, StepContext, step
from pipeline.graph.order import topological
from pipeline.graph.step import as_node
from pipeline.store import lease, run_summary, storage
from pipeline.store.garbage import delete, find_garbage
from pipeline.store.left_overs import Tree, tidy, unneeded
from pipeline.store.manifest import NAME, load
from pipeline.store.outputs import Store
from pipeline.store.protection import Keep
from pipeline.store.shards import Shard
from tests.pipeline.helpers import bring_up, executed, result
from tests.pipeline.toy import Numbers, Order, clamp, noise, numbers, opened, order, total

_PRESETS_ONLY = Keep(recorded=False)
GATES: dict[str, tuple[threading.Event, threading.Event]] = {}


@step(output=Artifact, version=1)
def reader(run: StepContext, numbers: Numbers, *, gate: str) -> Result:
    """Opens its input, waits, and reads it."""
    started, go = GATES[gate]
    started.set()
    assert go.wait(30)
    return {"total": sum(numbers.values())}


@step(output=Artifact, version=1)
def reader_through(run: StepContext, order: Order, *, gate: str) -> Result:
    """Reads what its input opens."""
    behind = order.input("numbers", Numbers)
    started, go = GATES[gate]
    started.set()
    assert go.wait(30)
    return {"total": sum(behind.values())}


class _Reading:
    """A run in a thread whose step waits with its input open, until `finish`."""

    def __init__(self, store: str, build) -> None:
        self.gate = str(len(GATES))
        started, self.go = GATES[self.gate] = (threading.Event(), threading.Event())
        self._errors: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, args=(store, build))
        self._thread.start()
        assert started.wait(30)

    def _run(self, store, build) -> None:
        def graph(count: int = 10):
            return build(self.gate)

        try:
            Experiment(graph).run(prefix=store, executor="inline")
        except BaseException as error:  # noqa: BLE001 - raised by `finish`
            self._errors.append(error)

    def finish(self) -> None:
        """Let the step read its input; raises what the run raised."""
        self.go.set()
        self._thread.join()
        for error in self._errors:
            raise error


def _listed(store: str, *wanted, keep: Keep = _PRESETS_ONLY):
    return find_garbage(Store(store), topological([as_node(w) for w in wanted]), keep).garbage


def _names(garbage) -> set[str]:
    return {item.root.rpartition("/")[2] for item in garbage if item.whole}


def _keep(wanted) -> Keep:
    return Keep(recorded=False, outputs=frozenset({as_node(wanted).directory}))


def _collect(store: str, *wanted, keep: Keep = _PRESETS_ONLY) -> set[str]:
    found = _listed(store, *wanted, keep=keep)
    delete(Store(store), found)
    return _names(found)


def test_what_a_build_reads_stays_although_no_preset_needs_it(tmp_path):
    """`gc --presets-only --delete` beside a run with flags."""
    store = str(tmp_path)
    run = _Reading(store, lambda gate: reader(numbers(count=10), gate=gate))
    _collect(store)
    run.finish()
    assert as_node(numbers(count=10)).directory in _collect(store)
    assert Store(store).outputs() == []


def test_the_attempt_that_a_build_reads_stays_when_its_input_is_rebuilt(tmp_path):
    """Collected with the flags' defaults, also through an alias and twice rebuilt."""
    store, source = str(tmp_path), noise(numbers(count=4))
    run = _Reading(store, lambda gate: reader(source, gate=gate))
    root = tmp_path / as_node(source).directory
    first = load(str(root)).shards[0].root
    for _ in range(2):
        bring_up(store, source, force=("noise",))
        tidied = {path.name for path in (root / "retired").iterdir()}
        _collect(store, source, keep=Keep())
        assert {path.name for path in (root / "retired").iterdir()} == tidied
    assert (root / first).exists()
    run.finish()
    _collect(store, source, keep=Keep())
    assert not (root / first).exists()
    assert list((root / "retired").iterdir()) == []


def test_what_a_build_reads_through_its_input_stays_in_every_attempt(tmp_path):
    """The input's input, rebuilt while it is open, and both without a preset."""
    store, source = str(tmp_path), noise(numbers(count=4))
    run = _Reading(store, lambda gate: reader_through(order(source), gate=gate))
    bring_up(store, source, force=("noise",))
    _collect(store)
    run.finish()


@pytest.mark.slow
def test_an_alias_that_a_build_reads_keeps_the_files_it_refers_to(tmp_path):
    """Also once the alias was rebuilt, and nothing else refers to them."""
    store = str(tmp_path)
    bring_up(store, clamp(clamp(numbers(count=10), limit=100), limit=50))
    alias = clamp(clamp(numbers(count=10), limit=200), limit=50)
    bring_up(store, alias)
    assert load(storage.join(store, as_node(alias).directory)).alias is not None
    run = _Reading(store, lambda gate: reader(alias, gate=gate))
    bring_up(store, alias, force=(as_node(alias).directory,))
    assert load(storage.join(store, as_node(alias).directory)).alias is None
    _collect(store, alias)
    run.finish()


def test_what_a_run_will_read_stays_before_its_step_begins(tmp_path):
    """A step that is built first has nothing to do with it."""
    store, source = str(tmp_path), numbers(count=10)
    bring_up(store, source)
    run = _Reading(store, lambda gate: total(source, reader_numbers(noise(source), gate=gate)))
    assert as_node(source).directory not in _collect(store)
    run.finish()
    assert executed(store, source) == []


@step(output=Numbers, version=1)
def reader_numbers(run: StepContext, numbers: Numbers, *, gate: str) -> Result:
    """Waits, and writes what it read."""
    started, go = GATES[gate]
    started.set()
    assert go.wait(30)
    with run.shard("all") as directory:
        storage.write_atomic(storage.join(directory, "n.txt"), b"1")
    return {"total": sum(numbers.values())}


@pytest.mark.slow
@pytest.mark.parametrize("alive", [True, False])
def test_a_reader_is_judged_as_a_leases_owner_is(tmp_path, monkeypatch, alive):
    """Elsewhere, with an old heartbeat: what it reads stays if it beats while it is watched."""
    monkeypatch.setattr(lease, "STALE_SECONDS", 0.5)
    monkeypatch.setattr(lease, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(lease, "LOOK_SECONDS", 0.05)
    store, source = str(tmp_path), numbers(count=10)
    bring_up(store, source)
    base = storage.join(store, f"train-{'0' * 20}", "leases", "000001")
    reads = {as_node(source).directory: ""}
    storage.create(f"{base}.json", json.dumps({"host": "elsewhere", "reads": reads}).encode())
    keep = Keep(recorded=False, outputs=frozenset({f"train-{'0' * 20}"}))
    garbage = _listed(store, keep=keep)
    assert not garbage, "it beats for all that one look can tell"
    monkeypatch.setattr(lease.Holder, "responsive", False)
    garbage = _listed(store, keep=keep)
    assert _names(garbage) == {as_node(source).directory}
    over = threading.Event()

    def beat() -> None:
        for count in range(1000):
            storage.write_atomic(f"{base}.beat", str(count).encode(), durable=False)
            if over.wait(0.05):
                return

    beating = threading.Thread(target=beat)
    if alive:
        beating.start()
    freed, left = delete(Store(store), garbage, wait=5)
    over.set()
    assert (freed == 0) == alive
    assert bool(left) == alive
    assert (executed(store, source) == []) == alive


def test_what_was_listed_and_is_needed_by_now_is_not_deleted(tmp_path):
    """A run was recorded between the list and the answer to the question."""
    store = str(tmp_path)

    def graph(count: int = 8):
        return total(numbers(count=count))

    bring_up(store, numbers(count=8))
    garbage = _listed(store, keep=Keep())
    assert len(garbage) == 1
    Experiment(graph).run(prefix=store, executor="inline")
    freed, left = delete(Store(store), garbage)
    assert freed == 0
    assert "needed by now" in left[0]
    assert executed(store, numbers(count=8)) == []


@pytest.mark.slow
def test_a_reader_that_begins_while_gc_decides_waits_and_finds_no_dead_output(tmp_path):
    """It registers before it looks, and looks once the collector has decided."""
    store, source = str(tmp_path), numbers(count=8)
    bring_up(store, source)
    begun = threading.Event()

    def graph(count: int = 8):
        return total(numbers(count=count))

    def run() -> None:
        begun.set()
        Experiment(graph).run(prefix=store, executor="inline")

    thread = threading.Thread(target=run)
    with lease.collecting(store):
        thread.start()
        begun.wait(10)
        deadline = time.monotonic() + 30
        while not any(run_summary.run_ids(store).values()):
            assert time.monotonic() < deadline, "the run has no summary"
            time.sleep(0.01)
        # What a collector does that decided before it could see the run.
        (tmp_path / as_node(source).directory / NAME).unlink()
    thread.join()
    assert result(store, total(source))["total"] == sum(range(8))


def test_a_kept_output_keeps_what_it_needs_to_be_used_and_no_more(tmp_path):
    """An order opens its numbers; what those were made from goes."""
    store = str(tmp_path)
    cut = clamp(numbers(count=10), limit=100)
    bring_up(store, opened(order(cut)))
    gone = _collect(store, keep=_keep(order(cut)))
    assert gone == {as_node(w).directory for w in (numbers(count=10), opened(order(cut)))}
    found = Order(*_found(store, order(cut)))
    assert sum(found.input("numbers", Numbers).values()) == 45


def _found(store, wanted):
    path = storage.join(store, as_node(wanted).directory)
    return path, load(path)


def test_a_model_keeps_its_tokenizer():
    """By way of its sequences and their token cache, packed or not."""
    from steps.artifacts import Checkpoint, Sequences, TokenCache

    assert Checkpoint.needs_input("sequences")
    assert Sequences.needs_input("tokens")
    assert Sequences.needs_input("sequences[3]")
    assert TokenCache.needs_input("tokenizer")
    assert not TokenCache.reads("tokenizer"), "contents of token caches are what they were"
    assert not TokenCache.needs_input("documents")


def test_an_output_of_before_keeps_all_of_its_inputs(tmp_path):
    """Its manifest does not say which ones it needs."""
    store, made = str(tmp_path), clamp(numbers(count=10), limit=100)
    bring_up(store, made)
    url = tmp_path / as_node(made).directory / NAME
    tree = json.loads(url.read_bytes())
    del tree["needs"]
    url.write_text(json.dumps(tree))
    assert _collect(store, keep=_keep(made)) == set()


def test_thousands_of_outputs_are_deleted_by_few_threads(tmp_path):
    """A lease is held while its output is deleted, and no longer."""
    for number in range(60):
        root = tmp_path / f"train-{number:020x}"
        (root / "ledger" / "x").mkdir(parents=True)
        (root / "ledger" / "x" / "a.json").write_text("{}")
    most, others = [], threading.active_count()
    true = lease.Lease.__init__

    def counted(self, *arguments):
        true(self, *arguments)
        most.append(threading.active_count())

    lease.Lease.__init__ = counted
    try:
        assert len(_collect(str(tmp_path))) == 60
    finally:
        lease.Lease.__init__ = true
    assert max(most) - others < 30
    assert Store(str(tmp_path)).outputs() == []


def _calls(function) -> int:
    count = 0

    def counted(frame, event, argument) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counted)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def test_tidying_takes_work_in_proportion_to_the_shards():
    """Four times the shards are four times the calls of functions and methods."""
    attempt = "attempts/000001-aaaaaaaa"

    def work(shards: int) -> int:
        roots = [f"{attempt}/shards/train/{i:06d}/0000" for i in range(shards)]
        tree = Tree.__new__(Tree)
        tree.root, tree._inside = "/nowhere", {}
        tree.entries = {f"{root}/cache/f{n}": (1, 0.0) for root in roots for n in range(3)}
        tree.entries[f"{attempt}/shards/train/left/0000/x"] = (1, 0.0)
        tree.index()
        listed = tuple(Shard(root, root, (), {}) for root in roots)
        published = SimpleNamespace(
            shards=listed, attempt="000001-aaaaaaaa", paths=lambda: {s.root for s in listed}
        )

        def walk() -> None:
            gone = unneeded(tree, published, lambda _: True, lambda _: True)
            assert gone == [f"{attempt}/shards/train/left"]

        return _calls(walk)

    few, many = work(200), work(800)
    assert many < 4.5 * few


def test_tidying_keeps_the_manifests_that_rebuilds_replaced(tmp_path):
    """Whoever reads them, and whoever tidies."""
    store, source = str(tmp_path), noise(numbers(count=4))
    bring_up(store, source)
    root = tmp_path / as_node(source).directory
    old = load(str(root)).shards[0].root
    bring_up(store, source, force=("noise",))
    held = lease.acquire(str(root), published=lambda: False, waiting=lambda _: None)
    tidy(str(root), held, f"{held.number:06d}-mine", lost=True)
    held.release()
    assert (root / old).exists()
