"""Steps that follow one another, and a backend of threads to run them at once in this process."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pipeline import InputError, Live, Result, Runtime, StepContext, step
from pipeline.errors import Cancelled, ResourcesUnavailable
from pipeline.execute.attempt import Outcome, Request, execute
from pipeline.execute.backend import Backend, InlineWorkers
from pipeline.graph.step_context import ShardTask, write_shard
from pipeline.store import storage
from tests.pipeline.toy import Numbers, Total

DEADLINE = 60.0


def _until(true: Any, what: str) -> None:
    end = time.monotonic() + DEADLINE
    while not true():
        assert time.monotonic() < end, f"{what} did not come"
        time.sleep(0.005)


def _once(marks: str, name: str) -> bool:
    try:
        Path(marks, name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def write_number(directory: str, item: int) -> Mapping[str, Any]:
    storage.write_atomic(storage.join(directory, "n.txt"), str(item).encode())
    return {"value": item}


@step(output=Numbers, version=1)
def counting(
    run: StepContext,
    *,
    count: int,
    salt: int = 0,
    marks: Annotated[str, Runtime],
    waits: Annotated[int, Runtime] = 99,
    lost_after: Annotated[int, Runtime] = 0,
    refuses_after: Annotated[int, Runtime] = 0,
) -> Result:
    """0 .. count - 1, a shard each; it waits until the first `waits` of them are followed."""
    for number in range(count):
        write_shard(
            ShardTask(run.ledger, run.attempt, f"part/{number:03d}", write_number, number + salt)
        )
        run.progress(number + 1, count, "numbers")
        if number < waits:
            _until(Path(marks, f"seen-{number + salt}").exists, f"the follower of {number}")
        if number + 1 == lost_after and _once(marks, "lost"):
            raise ConnectionResetError("told to be lost")
        if number + 1 == refuses_after:
            raise InputError("asked to refuse")
    return {"count": len(run.finished())}


@step(output=Total, version=1)
def watching(
    run: StepContext,
    numbers: Annotated[Numbers, Live],
    *,
    marks: Annotated[str, Runtime],
    fails: Annotated[str, Runtime] = "",
) -> Result:
    """Records every number that its input finishes, as it comes; the result is their sum."""
    live = Live.of(numbers)
    if fails == "no room" and live.published() is None:
        Path(marks, "seen-0").touch()
        raise ResourcesUnavailable("taken")
    while True:
        published = live.published()
        there = live.shards() if published is None else {s.name: s for s in published.shards()}
        for name in sorted(there.keys() - run.finished().keys()):
            value = there[name].result["value"]
            write_shard(ShardTask(run.ledger, run.attempt, name, write_number, value))
            with open(Path(marks, f"seen-{value}"), "a") as file:
                file.write(f"{run.attempt}\n")
            if fails == "refuses":
                raise InputError("asked to refuse")
            if fails == "leaves":
                return {}
        if published is not None:
            return {"total": sum(s.result["value"] for s in run.finished().values())}
        if run.stopping:
            raise Cancelled("asked to end")
        time.sleep(0.005)


class ThreadBackend(Backend):
    """Executes each request in a thread of its own, at most `slots` at once."""

    def __init__(self, slots: int = 4) -> None:
        self.slots = slots
        self.at_once = 0
        self._ended: queue.SimpleQueue[tuple[Request, Outcome]] = queue.SimpleQueue()
        self._events: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._workers: dict[str, InlineWorkers] = {}

    def submit(self, request: Request) -> None:
        workers = self._workers[request.key] = InlineWorkers()
        self.at_once = max(self.at_once, len(self._workers))

        def run() -> None:
            outcome = execute(request, self._events.put, workers, redirect=False)
            self._ended.put((request, outcome))

        threading.Thread(target=run, daemon=True).start()

    def poll(self) -> list[tuple[Request, Outcome]]:
        time.sleep(0.005)
        found = _all(self._ended)
        for request, _ in found:
            del self._workers[request.key]
        return found

    def events(self) -> list[dict[str, Any]]:
        return _all(self._events)

    def end(self, key: str) -> None:
        self._workers[key].stop()

    def stop(self) -> None:
        for workers in self._workers.values():
            workers.stop()


def _all(source: queue.SimpleQueue[Any]) -> list[Any]:
    found = []
    while not source.empty():
        found.append(source.get())
    return found
