"""The driver loses its store for a while, at a random moment, and its workers do not.

The workers are processes of their own. In this one, the driver's, every operation on the store
fails from a random one on. Even trials have the store on a disk, odd ones on `FakeGCS`. The time
is short, and so are the driver's pauses; or a minute, with the pauses of the product, in drivers
that run side by side.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import functools
import multiprocessing
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import aiohttp

from pipeline.execute import errands
from pipeline.execute.attempt import Outcome, Request, execute
from pipeline.execute.backend import InlineWorkers
from pipeline.execute.event_log import EventLog
from pipeline.execute.executor import Execution
from pipeline.graph.step import as_node
from pipeline.store import google_storage, local_storage, object_storage, retry
from pipeline.store.outputs import Store
from tests.faults.fake_gcs import FakeGCS
from tests.faults.registry import Fault, trials
from tests.pipeline.helpers import check_invariants, heard
from tests.pipeline.toy import Scale, clamp, numbers, scaled, total

SECONDS = 0.3
MINUTE = 60.0
_STEPS = 7
_DRIVERS = 5  # side by side: most of their time they wait


class Outage:
    """Counts the operations of this process on stores; from one of them on, they fail for a while.

    Attributes:
        operations: how many there were.
        failed: how many of them failed.
        early: whether the first that failed came before the executor ran.
        seconds: how long they fail.
    """

    def __init__(self, begins: float = float("inf"), seconds: float = SECONDS) -> None:
        self.operations = self.failed = 0
        self.early = False
        self._begins, self.seconds = begins, seconds
        self._ends: float | None = None
        self._lock = threading.Lock()

    def check(self) -> None:
        """Count an operation. Raises `OSError` during the outage."""
        with self._lock:
            self.operations += 1
            now = time.monotonic()
            if self.operations > self._begins and self._ends is None:
                self._ends = now + self.seconds
                self.early = retry._current()[1] is None
            if self._ends is not None and now < self._ends:
                self.failed += 1
                raise OSError(errno.EIO, "the store is away")


@contextlib.contextmanager
def disturbed(outage: Outage) -> Iterator[Outage]:
    """Let every operation of this process on a store pass the outage; pauses are short."""
    on_disk, on_bucket = local_storage.with_retries, google_storage._send_once

    def with_retries(path: str, action: Callable[[], Any]) -> Any:
        return on_disk(path, lambda: (outage.check(), action())[1])

    async def send_once(*arguments: Any, **more: Any) -> Any:
        try:
            outage.check()
        except OSError as error:
            raise aiohttp.ServerDisconnectedError from error
        return await on_bucket(*arguments, **more)

    short = {
        (local_storage, "_POLICY"): retry.Policy(1.0, 0.001, attempts=2),
        (object_storage, "GIVE_UP_SECONDS"): 0.05,
        (object_storage, "FIRST_WAIT_SECONDS"): 0.01,
        (errands, "FIRST_PAUSE_SECONDS"): 0.01,
        (errands, "LONGEST_PAUSE_SECONDS"): 0.1,
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(local_storage, "with_retries", with_retries))
        stack.enter_context(mock.patch.object(google_storage, "_send_once", send_once))
        for (module, name), value in short.items() if outage.seconds < MINUTE else ():
            stack.enter_context(mock.patch.object(module, name, value))
        yield outage


def _work(request: Request) -> tuple[Outcome, list[dict[str, Any]]]:
    events: list[dict[str, Any]] = []
    return execute(request, events.append, InlineWorkers()), events


class Processes:
    """A backend whose workers are a few processes of this machine.

    Attributes:
        ended: keys of steps that the driver told to end.
    """

    slots = 100

    def __init__(self, pool: concurrent.futures.Executor) -> None:
        self._pool = pool
        self._running: dict[concurrent.futures.Future[Any], Request] = {}
        self._events: list[dict[str, Any]] = []
        self.ended: list[str] = []

    def submit(self, request: Request) -> None:
        """Hand the request to a process."""
        self._running[self._pool.submit(_work, request)] = request

    def poll(self) -> list[tuple[Request, Outcome]]:
        """Outcomes since the last call."""
        done, _ = concurrent.futures.wait(self._running, 0.05, concurrent.futures.FIRST_COMPLETED)
        ended = []
        for future in done:
            outcome, events = future.result()
            self._events += events
            ended.append((self._running.pop(future), outcome))
        return ended

    def events(self) -> list[dict[str, Any]]:
        """Events of the attempts that have ended."""
        events, self._events = self._events, []
        return events

    def end(self, key: str) -> None:
        """Nothing is ended in these trials."""
        self.ended.append(key)

    def stop(self) -> None:
        """Nothing is stopped in these trials."""

    close = stop


@contextlib.contextmanager
def processes(count: int = 3) -> Iterator[concurrent.futures.Executor]:
    """Processes for `Processes`, which take seconds to start."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(count, context) as pool:
        yield pool


def graph() -> list[Any]:
    """Seven steps, of which several run at a time; two of them have equal inputs in the end."""
    source = numbers(count=12, shards=3)
    high, higher = (clamp(numbers=source, limit=limit) for limit in (50, 60))
    tripled = scaled(numbers=source, scale=Scale(3))
    sums = [total(left=tripled, right=right) for right in (high, higher)]
    return [*sums, total(left=tripled)]


def run(prefix: str, backend: Processes, events: list[dict[str, Any]]) -> dict[str, Any]:
    """Execute the graph; label, result and content of every output, by key."""
    log = EventLog(prefix, "test", [heard(events.append)])
    targets = [as_node(node) for node in graph()]
    execution = Execution(targets, Store(prefix), log, "again")
    try:
        execution.run(backend, execution.look())
    finally:
        log.close()
    found = {key: there.manifest for key, there in execution.published.items()}
    return {
        key: (
            m.label,
            m.result,
            m.content,
            [[(f.path, f.sha256) for f in s.files] for s in m.shards],
        )
        for key, m in sorted(found.items())
    }


def _trial(
    pool: concurrent.futures.Executor,
    stores: list[str],
    calm: list[tuple[Any, int]],
    seconds: float,
    number: int,
) -> None:
    prefix = f"{stores[number % 2]}/{number}"
    expected, operations = calm[number % 2]
    begins = random.Random(number).randrange(operations * 9 // 10)  # their number varies
    events: list[dict[str, Any]] = []
    backend = Processes(pool)
    with disturbed(Outage(begins, seconds)) as outage:
        made = run(prefix, backend, events)
    where = f"an outage at operation {begins} of {operations}"
    assert outage.failed, f"{where}: nothing failed"
    assert made == expected, f"{where}: other outputs"
    kinds = [event["event"] for event in events]
    # Before the executor runs, retries are printed, not reported as events.
    assert "retrying" in kinds or outage.early, f"{where}: not reported"
    assert not backend.ended, f"{where}: a running step was ended"
    assert not {"failed", "retried", "skipped"} & set(kinds), f"{where}: {kinds}"
    assert check_invariants(prefix, finished=True) == _STEPS


def lose_store(seed: int, count: int, workspace: Path, seconds: float = SECONDS) -> dict[str, Any]:
    """Every run ends well, each body runs once, and the outputs are those of a calm run."""
    stores = [str(workspace), "gs://bucket/runs"]
    with FakeGCS(), processes() as pool:
        calm = []
        for store in stores:
            with disturbed(Outage()) as outage:
                calm.append((run(f"{store}/calm", Processes(pool), []), outage.operations))
        figures = {"operations": [operations for _, operations in calm]}
        made = trials(seed, count, functools.partial(_trial, pool, stores, calm, seconds))
    return {**figures, "trials": made}


def lose_store_for_a_minute(seed: int, count: int, workspace: Path) -> dict[str, Any]:
    """The same with a minute's outage in each of several drivers, of a process each."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(_DRIVERS, context) as pool:

        def lose(number: int) -> None:
            place = workspace / str(number)
            place.mkdir()
            pool.submit(lose_store, number, 1, place, MINUTE).result()

        with concurrent.futures.ThreadPoolExecutor(_DRIVERS) as threads:
            made = threads.map(lambda number: trials(number, 1, lose), range(seed, seed + count))
            return {"trials": sum(made)}


FAULTS = {
    36: [
        Fault("a driver that loses its store for a while", 4, 50, lose_store),
        Fault("a driver that loses its store for a minute", 0, 10, lose_store_for_a_minute),
    ]
}
