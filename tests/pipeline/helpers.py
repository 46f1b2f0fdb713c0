"""Running graphs in tests, and checking what a store holds afterwards."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import msgspec

from pipeline.events import Event
from pipeline.execute import errands, node_state
from pipeline.execute.attempt import execute
from pipeline.execute.backend import Backend, InlineBackend, InlineWorkers
from pipeline.execute.event_log import EventLog, Listener
from pipeline.execute.executor import Execution
from pipeline.execute.request import Outcome, Request
from pipeline.graph.step import as_node
from pipeline.plan.plan import Planned, plan
from pipeline.plan.state import Selection
from pipeline.store import storage
from pipeline.store.ledger import DIRECTORY as LEDGER
from pipeline.store.ledger import Ledger
from pipeline.store.manifest import Manifest, load, load_verified
from pipeline.store.outputs import Store
from pipeline.store.shards import Shard

PATIENCE_SECONDS = 1.0  # of the driver with its store


def heard(listener: Callable[[dict[str, Any]], object]) -> Listener:
    """A listener that passes events on as they are in the log."""

    def listen(event: Event) -> None:
        listener({"event": event.__struct_config__.tag, **msgspec.structs.asdict(event)})

    return listen


class Timed(Backend):
    """Executes requests in this process, for a driver on a clock of the backend's own."""

    slots = 10

    def __init__(self) -> None:
        self.now, self.sleeps = 0.0, list[float]()
        self._said: list[Any] = []

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds

    def events(self) -> list[Any]:
        said, self._said = self._said, []
        return said

    def execute(self, request: Request) -> tuple[Request, Outcome]:
        return request, execute(request, self._said.append, InlineWorkers(), redirect=False)


def run_on(
    backend: Backend | Callable[[EventLog], Backend],
    prefix: str,
    *wanted: Any,
    events: Any = None,
    shared: tuple[str, ...] = (),
    wait: float | None = None,
    **choice: Any,
) -> Execution:
    """Execute a graph on a backend, or on one made of the log; returns the finished execution.

    `events` is a list for the events, or a function that is called with each.
    """
    listener = getattr(events, "append", events)
    log = EventLog(prefix, "test", [] if listener is None else [heard(listener)])
    nodes = [as_node(w) for w in wanted]
    more = {}
    if isinstance(backend, Timed):
        more = {"clock": lambda: backend.now, "sleep": backend.sleep}
    store, chosen = Store(prefix, shared), Selection(**choice)
    execution = Execution(nodes, store, log, "again", chosen, wait, **more)
    try:
        execution.run(backend(log) if callable(backend) else backend, execution.look())
    finally:
        log.close()
    return execution


def bring_up(prefix: str, *wanted: Any, **options: Any) -> Execution:
    """As `run_on`, in this process and with short pauses."""
    with (
        mock.patch.object(node_state, "FIRST_PAUSE_SECONDS", 0.01),
        mock.patch.object(errands, "FIRST_PAUSE_SECONDS", 0.01),
        mock.patch.object(errands, "PATIENCE_SECONDS", PATIENCE_SECONDS),
    ):
        return run_on(InlineBackend, prefix, *wanted, **options)


def executed(prefix: str, *wanted: Any, **options: Any) -> list[str]:
    return [node.label for node in bring_up(prefix, *wanted, **options).executed]


def planned(prefix: str, wanted: Any, shared: tuple[str, ...] = (), **how: Any) -> Planned:
    """What a run would do with the node."""
    return plan([as_node(wanted)], Store(prefix, shared), **how)[-1]


def path_of(prefix: str, wanted: Any) -> str:
    return storage.join(prefix, as_node(wanted).directory)


def manifest_of(prefix: str, wanted: Any) -> Manifest | None:
    return load(path_of(prefix, wanted))


def result(prefix: str, wanted: Any) -> dict[str, Any]:
    published = manifest_of(prefix, wanted)
    assert published is not None
    return published.result


def ledgers(path: str) -> list[Ledger]:
    return [Ledger(path, name) for name in storage.list_names(storage.join(path, LEDGER))]


def recorded(prefix: str) -> dict[tuple[str, str], Shard]:
    """Every finished shard in a store by (step directory, root): of ledgers and manifests."""
    found: dict[tuple[str, str], Shard] = {}
    for name in storage.list_names(prefix):
        path = storage.join(prefix, name)
        published = load(path)
        shards = {s.root: s for ledger in ledgers(path) for s in ledger.finished().values()}
        # The files of an output that refers to another one are looked at there.
        own = published is not None and published.alias is None
        for shard in published.shards if published is not None and own else ():
            # What a ledger says of a published shard, the manifest must say too.
            assert shards.setdefault(shard.root, shard) == shard, f"{path}: two records {shard}"
        found |= {(name, shard.root): shard for shard in shards.values()}
    return found


def check_invariants(prefix: str, *, finished: bool = False) -> int:
    """What must hold in every store after any disturbance; returns the number of outputs.

    Each manifest and each ledger record verifies byte for byte, no key is published twice, and an
    input was published with the digest that its user recorded. With `finished`, for a store whose
    last run ended well: of what is not published only logs are left.
    """
    published: dict[str, Manifest] = {}
    for name in storage.list_names(prefix):
        found = load_verified_at(prefix, name)
        if found is not None:
            assert found.key not in {m.key for m in published.values()}, f"{found.key} twice"
            published[name] = found
    for name, found in published.items():
        for reference in found.inputs.values():
            source = published.get(reference["directory"].rpartition("/")[2])
            if source is not None:
                assert source.key == reference["key"], f"{name}: another input than recorded"
                assert source.content == reference["digest"], f"{name}: its input has changed"
    files = _files(prefix)
    kept = set()
    for (name, _), shard in recorded(prefix).items():
        for file in shard.files:
            path = f"{name}/{shard.root}/{file.path}"
            data = storage.read_bytes(storage.join(prefix, path)) if path in files else None
            assert data is not None, f"{path}: recorded and missing"
            assert len(data) == file.size, f"{path}: {len(data)} bytes, recorded {file.size}"
            assert hashlib.sha256(data).hexdigest() == file.sha256, f"{path}: other content"
            kept.add(path)
    if finished:
        kept |= {f"{name}/{path}" for name, m in published.items() for path in m.paths()}
        data = {path for path in files if path.split("/")[1] == "attempts"}
        logs = {p for p in data if p.split("/")[3] in ("log.txt", "logs", "failure.json")}
        assert data - kept - logs == set(), f"left of unpublished attempts: {data - kept - logs}"
    return len(published)


def load_verified_at(prefix: str, name: str) -> Manifest | None:
    """The manifest of the step directory `name`, published for the key in its name."""
    path = storage.join(prefix, name)
    found = load(path)
    if found is not None:
        assert found.key.startswith(name.rpartition("-")[2]), f"{path}: key {found.key}"
        assert load_verified(path, found.key) == found
    return found


def temporaries(prefix: str) -> list[str]:
    return sorted(path for path in _files(prefix) if path.endswith(".tmp"))


def _files(prefix: str) -> set[str]:
    """Every file of a store, relative to it, asked of the store and not of our own listing."""
    fs, root = storage.filesystem(prefix)
    fs.invalidate_cache()
    return {path.removeprefix(root.rstrip("/") + "/") for path in fs.find(root)}
