"""Faults of a remote store, each a function that disturbs the engine and checks what came of it.

Each takes a seed, how often to try, and an empty directory; it returns figures, and raises
`AssertionError` naming the seed of the trial that went wrong. The store is `FakeGCS`; the client
is the engine's own, gcsfs and all, only its waits between tries are made short.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from pipeline.errors import InputError, PonenteError, StepFailed, StoreUnavailable
from pipeline.store import object_storage, storage, write_check
from pipeline.store.manifest import load
from pipeline.store.write_check import check_writable
from tests.faults.fake_gcs import FakeGCS, Faults
from tests.faults.fake_gcs_store import BEFORE
from tests.faults.registry import Fault
from tests.pipeline import toy
from tests.pipeline.helpers import bring_up, check_invariants, result

PROCESSES = 4
SHARDS = 6
NOBODY = 65534
ALLOWED_SECONDS = 2.0
GIVE_UP_SECONDS = 0.5


@contextlib.contextmanager
def quick_retries(give_up: float = 60.0) -> Iterator[None]:
    """Retries of the store's client without their waits."""
    with (
        mock.patch.object(object_storage, "FIRST_WAIT_SECONDS", 0.002),
        mock.patch.object(object_storage, "LONGEST_WAIT_SECONDS", 0.02),
        mock.patch.object(object_storage, "GIVE_UP_SECONDS", give_up),
    ):
        yield


def graph(shards: int = SHARDS) -> Any:
    """Three steps: numbers in shards, the same tripled, the sum of both."""
    numbers = toy.numbers(count=10 * shards, shards=shards)
    return toy.total(left=numbers, right=toy.scaled(numbers=numbers, scale=toy.Scale(3)))


def expected(shards: int = SHARDS) -> int:
    """The sum that the graph must come to."""
    return 4 * sum(range(10 * shards))


def check_store(server: FakeGCS, prefix: str) -> None:
    """The right result, sound bytes, and every record written exactly once."""
    assert result(prefix, graph())["total"] == expected()
    assert check_invariants(prefix) == 3
    base = prefix.partition("://")[2].partition("/")[2]
    mine = {name: n for name, n in server.writes.items() if name.startswith(base + "/")}
    manifests = {name: n for name, n in mine.items() if name.endswith("/manifest.json")}
    records = {name: n for name, n in mine.items() if _is_record(name)}
    assert list(manifests.values()) == [1] * 3, manifests
    assert list(records.values()) == [1] * (SHARDS + 1), records
    assert _shards_published(prefix) == [1, SHARDS]


def _shards_published(prefix: str) -> list[int]:
    found = [load(storage.join(prefix, name)) for name in storage.list_names(prefix)]
    return sorted(len(m.shards) for m in found if m is not None and m.shards)


# 12: several executors, one store


def _executor(number: int, seed: int, count: int, barrier: Any) -> None:
    draw = random.Random(seed * PROCESSES + number)
    with quick_retries():
        for trial in range(count):
            barrier.wait(120)
            time.sleep(draw.uniform(0, 0.1) if trial % 2 else 0)
            bring_up(f"gs://bucket/race{trial}", graph())


def racing_executors(seed: int, count: int, workspace: Path) -> dict[str, Any]:
    """Four processes bring up the same graph at once: one record per output, all succeed."""
    del workspace
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(PROCESSES)
    with FakeGCS() as server, quick_retries():
        arguments = [(number, seed, count, barrier) for number in range(PROCESSES)]
        processes = [context.Process(target=_executor, args=a) for a in arguments]
        begun = time.monotonic()
        for process in processes:
            process.start()
        try:
            for process in processes:
                process.join(60 + 20 * count)
        finally:
            for process in processes:
                process.kill()
        codes = [process.exitcode for process in processes]
        seconds = time.monotonic() - begun
        assert codes == [0] * PROCESSES, f"seed {seed}: exit codes {codes}"
        for trial in range(count):
            check_store(server, f"gs://bucket/race{trial}")
        refused = sum(status == 412 for *_, status in server.log)
    assert refused > 0 or count < 10, "nothing raced"
    return {"races": count, "creates_lost": refused, "seconds": round(seconds, 1)}


# 21: a store that cannot be written


@contextlib.contextmanager
def _unprivileged() -> Iterator[None]:
    """As somebody whom permissions stop; root is stopped by none."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


def _denied_directory(workspace: Path, server: FakeGCS) -> str:
    directory = workspace / "denied"
    directory.mkdir(exist_ok=True)
    directory.chmod(0o555)
    return str(directory / "store")


def _file(workspace: Path, server: FakeGCS) -> str:
    (workspace / "file").write_text("not a directory")
    return str(workspace / "file")


def _missing_bucket(workspace: Path, server: FakeGCS) -> str:
    return "gs://missing/store"


def _denied_bucket(workspace: Path, server: FakeGCS) -> str:
    server.denied.add("bucket")
    return "gs://bucket/store"


def _quota(workspace: Path, server: FakeGCS) -> str:
    server.over_quota.add("bucket")
    return "gs://bucket/store"


UNWRITABLE: dict[str, tuple[Callable[[Path, FakeGCS], str], type[PonenteError], str]] = {
    "denied directory": (_denied_directory, InputError, "cannot be written"),
    "file": (_file, InputError, "expected a directory"),
    "missing bucket": (_missing_bucket, InputError, "no bucket"),
    "denied bucket": (_denied_bucket, InputError, "not permitted"),
    "quota": (_quota, StoreUnavailable, "429"),
}


def unwritable_stores(seed: int, count: int, workspace: Path) -> dict[str, Any]:
    """Five kinds of store that cannot be written are refused before any work, in two seconds."""
    del seed
    slowest: dict[str, float] = {}
    patience = mock.patch.object(write_check, "_CHECK_SECONDS", 1.0)  # with a quota
    with patience, FakeGCS() as warm:
        check_writable("gs://bucket/warm")  # imports gcsfs, which is not the store's fault
        assert not warm.buckets["bucket"]
    for _ in range(count):
        for kind, (prepare, error, words) in UNWRITABLE.items():
            with patience, FakeGCS() as server:
                prefix = prepare(workspace, server)
                begun = time.monotonic()
                raised: Exception | None = None
                # Only there: nobody may not even look into a temporary directory of root's.
                with _unprivileged() if kind == "denied directory" else contextlib.nullcontext():
                    try:
                        check_writable(prefix)
                    except PonenteError as caught:
                        raised = caught
                seconds = time.monotonic() - begun
                assert isinstance(raised, error), f"{kind}: {raised!r}"
                assert words in str(raised), f"{kind}: {raised}"
                assert prefix in str(raised), f"{kind}: {raised}"
                assert seconds < ALLOWED_SECONDS, f"{kind}: {seconds:.2f} s"
                assert not any(server.buckets.values()), kind
                slowest[kind] = max(slowest.get(kind, 0), seconds)
    return {"kinds": len(slowest), "slowest_s": {k: round(s, 3) for k, s in slowest.items()}}


# 22: requests that fail


def failing_requests(seed: int, count: int, workspace: Path) -> dict[str, Any]:
    """Of all requests 20 % or 50 % fail in seven ways: equal outputs. All fail: a clean error."""
    del workspace
    figures: dict[str, Any] = {"runs": 0, "requests": 0, "faults": 0}
    for probability in (0.2, 0.5):
        for trial in range(count):
            with FakeGCS() as server, quick_retries():
                server.faults = Faults(probability, seed=seed + trial)
                events: list[dict[str, Any]] = []
                bring_up("gs://bucket/store", graph(), events=events)
                server.faults = Faults()
                _check_single_attempts(events, seed + trial)
                check_store(server, "gs://bucket/store")
                figures["runs"] += 1
                figures["requests"] += server.requests
                figures["faults"] += sum(s in (0, 429, 500, 503) for *_, s in server.log)
    figures["lost_answers"] = _lost_answers(seed, count)
    figures["down_s"] = _store_down()
    return figures


def _check_single_attempts(events: list[dict[str, Any]], seed: int) -> None:
    """Every step was published by its first attempt: no success was taken for somebody else's."""
    statuses = [event["status"] for event in events if event["event"] == "finished"]
    assert statuses == ["published"] * 3, f"seed {seed}: {statuses}"
    assert not [event for event in events if event["event"] == "retried"], f"seed {seed}"


def _lost_answers(seed: int, count: int) -> int:
    """Half the answers are lost after the request was carried out; returns how many writes."""
    lost = 0
    for trial in range(count):
        with FakeGCS() as server, quick_retries():
            server.faults = Faults(0.5, kinds=("lost",), seed=seed + trial)
            events: list[dict[str, Any]] = []
            bring_up("gs://bucket/store", graph(), events=events)
            server.faults = Faults()
            _check_single_attempts(events, seed + trial)
            check_store(server, "gs://bucket/store")
            repeated = sum(status == 412 for *_, status in server.log)
            assert repeated > 0, f"seed {seed + trial}: no create was sent twice"
            lost += repeated
    return lost


def _store_down() -> float:
    """No request succeeds: a typed error that names the store, and nothing is left running."""
    with FakeGCS() as server, quick_retries(give_up=GIVE_UP_SECONDS):
        server.faults = Faults(1.0, kinds=(*BEFORE, "short"))
        begun = time.monotonic()
        raised: Exception | None = None
        try:
            bring_up("gs://bucket/store", graph())
        except PonenteError as caught:
            raised = caught
        seconds = time.monotonic() - begun
        assert isinstance(raised, StoreUnavailable | StepFailed), repr(raised)
        assert "gs://bucket/store" in str(raised), str(raised)
        assert seconds < 10 * GIVE_UP_SECONDS, f"{seconds:.1f} s"
        assert not [name for name in server.writes if name.endswith("/manifest.json")]
    return round(seconds, 2)


# 23: listings that lag


def stale_listings(seed: int, count: int, workspace: Path) -> dict[str, Any]:
    """An executor dies; the next one's listings do not show its last up to 200 requests.

    What the second executor writes itself it also lists, as with a client's listings cache; no
    store that anybody would use hides a writer's own files from it. Nothing finished is redone,
    nothing is lost, and the lease is not given to two.
    """
    hidden = 0
    for trial in range(count):
        draw = random.Random(seed + trial)
        marks = workspace / f"marks{trial}"
        prefix = "gs://bucket/store"
        with (
            FakeGCS() as server,
            quick_retries(),
            mock.patch.dict(os.environ, {"PONENTE_MARKS": str(marks)}),
        ):
            stop = draw.randint(1, SHARDS - 1)
            _bring_up_until(prefix, stop)
            lag = draw.randint(1, 200)
            server.faults = Faults(stale=lag, own_since=server.requests)
            what = f"seed {seed + trial}, {stop} shards finished, listings lag by {lag}"
            hidden += _records_hidden(server)
            bring_up(prefix, graph())
            assert not bring_up(prefix, graph()).executed, f"{what}: a finished step was redone"
            server.faults = Faults()
            written = marks.read_text().split()
            assert len(set(written)) == SHARDS, f"{what}: {written}"
            assert len(written) == SHARDS, f"{what}: shards written {written}"
            assert _shards_published(prefix) == [1, SHARDS], f"{what}: {_shards_published(prefix)}"
            assert all(_files_published(prefix)), f"{what}: a shard without its files"
            check_store(server, prefix)
    assert count < 5 or hidden > 0, "no listing lagged where it mattered"
    return {"runs": count, "shards_hidden": hidden}


def _is_record(name: str) -> bool:
    return "/ledger/" in name and name.endswith(".json")


def _records_hidden(server: FakeGCS) -> int:
    shown = {item["name"] for item in server.list("bucket", {})["items"]}
    return sum(_is_record(name) and name not in shown for name in server.buckets["bucket"])


def _files_published(prefix: str) -> list[int]:
    found = [load(storage.join(prefix, name)) for name in storage.list_names(prefix)]
    return [len(shard.files) for m in found if m is not None for shard in m.shards]


def _bring_up_until(prefix: str, stop: int) -> None:
    """An executor that dies when `stop` shards are written."""
    written = []
    real = toy.write_numbers

    def dying(directory: str, item: tuple[int, int]) -> Any:
        if len(written) == stop:
            raise RuntimeError("died")
        written.append(item)
        return real(directory, item)

    with mock.patch.object(toy, "write_numbers", dying), contextlib.suppress(StepFailed):
        bring_up(prefix, graph())
    assert len(written) == stop


FAULTS = {
    12: [Fault("four executors race for one graph on gs://", 2, 50, racing_executors)],
    21: [Fault("store that cannot be written", 1, 5, unwritable_stores)],
    22: [Fault("failing requests to gs://, engine", 1, 20, failing_requests)],
    23: [Fault("listings that lag", 5, 100, stale_listings)],
}
