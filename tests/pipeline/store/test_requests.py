"""How many requests questions about a store take: counted by a server in memory."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from urllib.parse import unquote

import pytest

from pipeline import Result, StepContext, step
from pipeline.graph.step import as_node
from pipeline.plan.plan import plan
from pipeline.plan.state import CORRUPT
from pipeline.store import integrity, manifest, storage
from pipeline.store.ledger import Ledger
from pipeline.store.manifest import Manifest, load
from pipeline.store.outputs import Store
from pipeline.store.parallel import concurrently, in_order
from tests.bench.request_servers import kind
from tests.faults import fake_gcs
from tests.faults.fake_gcs import FakeGCS
from tests.pipeline.helpers import bring_up
from tests.pipeline.toy import Numbers, Order, Scale, numbers, orders, scaled, total, write_numbers

STORE = "gs://bucket/store"
SHARDS = 20


@pytest.fixture
def server() -> Iterator[FakeGCS]:
    """A bucket."""
    with FakeGCS() as running:
        yield running


def published(shards: int) -> tuple[str, Manifest]:
    """Directory and manifest of an output of so many shards, just built."""
    wanted = numbers(count=shards, shards=shards)
    bring_up(STORE, wanted)
    path = storage.join(STORE, as_node(wanted).directory)
    found = load(path)
    assert found is not None
    assert len(found.shards) == shards
    return path, found


@step(output=Numbers, version=1)
def mapped_often(run: StepContext, *, calls: int) -> Result:
    """The same shards asked for again and again."""
    items = {f"part/{i:03d}": (i, 1) for i in range(SHARDS)}
    for _ in range(calls):
        written = run.map(write_numbers, items)
    return {"count": len(written)}


def test_a_body_that_maps_often_reads_each_record_twice_at_most(server):
    """Once before the shard is written, once after; a call more costs no reading of records."""
    bring_up(STORE, mapped_often(calls=20))
    asked = [(unquote(path), kind(method, path, query)) for method, path, query, _ in server.log]
    read = Counter(
        name
        for name, what in asked
        if "/ledger/" in name and name.endswith(".json") and what.startswith("get ")
    )
    assert len(read) == SHARDS
    assert max(read.values()) <= 2, read.most_common(3)


def test_verify_takes_one_listing_whatever_the_number_of_shards(server):
    """Every shard's files are in it."""
    listings = []
    for shards in (2, 12):
        path, found = published(shards)
        before = len(server.log)
        assert list(integrity.problems(path, found)) == []
        listings.append(sum(kind(*sent[:3]) == "list" for sent in server.log[before:]))
    assert listings == [1, 1]


def test_verify_finds_by_one_listing_what_each_shard_has_and_lacks(server):
    """Other bytes, a missing file, a foreign one; what stands beside the shards is not theirs."""
    path, found = published(12)
    roots = [storage.join(path, shard.root) for shard in found.shards]
    storage.write_atomic(f"{roots[3]}/n.txt", b"x")
    storage.delete_tree(f"{roots[5]}/n.txt")
    storage.write_atomic(f"{roots[7]}/deep/er.txt", b"foreign")
    storage.write_atomic(f"{roots[0]}0/n.txt", b"beside")
    assert list(integrity.problems(path, found)) == [
        f"{roots[3]}/n.txt: bytes 0-0 are not what was written",
        f"{roots[5]}/n.txt: missing, expected 1 bytes",
        f"{roots[7]}/deep/er.txt: not recorded, and never read",
    ]


def test_verify_asks_for_what_a_listing_that_lags_behind_does_not_show(server):
    """A file that is there is sound, whether it is listed or not."""
    path, found = published(5)
    server.faults.stale = 10_000
    assert list(integrity.problems(path, found)) == []


@pytest.fixture
def asked(server, monkeypatch) -> Iterator[list[str]]:
    """Paths that were asked of a store that takes connections and requests, and never answers."""
    paths: list[str] = []
    over = threading.Event()

    def never(self, path, query, body):
        paths.append(unquote(path))
        over.wait(60)
        raise ConnectionResetError

    monkeypatch.setattr(fake_gcs.Handler, "_answer", never)
    yield paths
    over.set()


@pytest.mark.slow
def test_a_store_elsewhere_that_does_not_answer_is_asked_once(asked, tmp_path, monkeypatch):
    """Two outputs refer to it: the second one is damaged too, and costs no second wait."""
    monkeypatch.setattr(manifest, "_ELSEWHERE_SECONDS", 0.2)
    store, targets = Store(str(tmp_path)), [as_node(numbers(count=n)) for n in (4, 6)]
    bring_up(store.prefix, *targets)
    for number, node in enumerate(targets):
        url = tmp_path / node.directory / manifest.NAME
        place = f"{STORE}/other{number}-{'0' * 20}"
        origin = {"kind": "adopted", "directory": place, "key": "0" * 64, "input": ""}
        tree = {**json.loads(url.read_bytes()), "origin": {**origin, "differences": []}}
        url.write_text(json.dumps(tree))
    entries = plan(targets, store)
    assert [entry.status for entry in entries] == [CORRUPT, CORRUPT]
    assert all(STORE in e.reason and "cannot be read" in e.reason for e in entries)
    assert asked
    assert all("/other0-" in path for path in asked), asked


@pytest.fixture
def at_once(server, monkeypatch) -> Callable[[], list[tuple[int, str]]]:
    """From a call on requests take 20 ms; how many were being answered as each came, and which."""
    seen: list[tuple[int, str]] = []

    def begin() -> list[tuple[int, str]]:
        monkeypatch.setattr(fake_gcs.Handler, "_answer", counted)
        return seen

    lock, running, answer = threading.Lock(), [0], fake_gcs.Handler._answer

    def counted(self, path, query, body):
        with lock:
            running[0] += 1
            seen.append((running[0], f"{unquote(path)} {query}"))
        time.sleep(0.02)
        try:
            return answer(self, path, query, body)
        finally:
            with lock:
                running[0] -= 1

    return begin


@pytest.mark.slow
def test_a_plan_asks_about_several_unfinished_steps_at_a_time(at_once):
    """What it says is what it says of the same store on a disk: causes go from inputs to users."""
    targets = [as_node(numbers(count=n)) for n in range(30, 46)]
    for node in targets:
        storage.create(storage.join(STORE, node.directory, "ledger", "x", "y-.expected"), b"")
    seen = at_once()
    assert {entry.status for entry in plan(targets, Store(STORE))} == {"miss"}
    assert max(number for number, asked in seen if "leases" in asked) > 4


@pytest.mark.slow
def test_a_plan_of_a_bucket_says_what_a_plan_of_a_disk_says(server, tmp_path):
    """Inputs are explained before their users, in whichever order the steps are asked about."""

    def graph(factor: int):
        source = numbers(count=4)
        first = scaled(source, scale=Scale(factor))
        ends = [total(scaled(first, scale=Scale(k)), source) for k in (2, 3)]
        return [as_node(end) for end in ends]

    said = []
    for prefix in (STORE, str(tmp_path)):
        bring_up(prefix, *graph(1))
        entries = plan(graph(7), Store(prefix))
        said.append([(e.node.label, e.status, e.lines, e.nearest) for e in entries])
        assert {e.status for e in entries} == {"hit", "miss"}
    assert said[0] == said[1]


@pytest.mark.slow
def test_a_step_opens_its_inputs_several_at_a_time(at_once):
    """And so does what opens the inputs of its input."""
    many = tuple(numbers(count=n) for n in range(2, 8))
    bring_up(STORE, *many)
    seen = at_once()

    class Events(list):
        def append(self, event):
            if event["event"] == "started":
                seen.clear()  # of the looks before the attempt

    found = bring_up(STORE, orders(many), events=Events())
    assert max(seen)[0] > 2
    (path,) = [f.path for f in found.published.values() if f.manifest.step == "orders"]
    seen.clear()
    assert len(Order(path, load(path)).inputs("numbers", Numbers)) == 6
    assert max(seen)[0] > 2


def test_results_that_are_not_taken_do_not_pile_up():
    """They come in the order of the items, and what nobody takes is not computed for long."""
    begun: list[int] = []
    results = in_order(lambda n: begun.append(n) or n, range(1000), "memory://x")
    assert [next(results), next(results)] == [0, 1]
    time.sleep(0.05)
    assert len(begun) <= 34
    results.close()
    assert list(in_order(lambda n: -n, range(100), "memory://x")) == [-n for n in range(100)]
    with pytest.raises(ZeroDivisionError):
        concurrently(lambda n: 1 // n, [3, 2, 1, 0, 1], "memory://x")


def test_a_small_file_of_a_shard_is_digested_by_one_request(server):
    """Its size is known from the listing that found it."""
    ledger = Ledger(STORE)
    directory = f"{STORE}/attempts/1/shards/a"
    storage.write_atomic(f"{directory}/n.txt", b"123")
    before = len(server.log)
    ledger.add("a", directory, {})
    asked = [line for line in server.log[before:] if "n.txt" in unquote(line[1])]
    assert [kind(*line[:3]) for line in asked] == ["get object"]
