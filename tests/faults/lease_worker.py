"""A process of the lease trials: an executor that takes its orders on stdin.

One JSON line in, one out: the order says which graph to bring up in which store, with which lease
times, under which clock, and where to stop itself. Kept alive between orders, so that a race costs
no interpreter start. Imported by name (not run with -m): a step needs an importable home.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pipeline import Artifact, Result, Runtime, StepContext, step
from pipeline.graph.step import as_node
from pipeline.store import lease, manifest, process, storage
from tests.pipeline.helpers import bring_up

# Every storage function that touches the store; those that exist are counted and stopped at.
OPERATIONS = (
    *("exists", "size", "read_bytes", "open_read", "open_write", "create", "write_atomic"),
    *("list_names", "list_files", "sha256", "delete_tree"),
)
PLACES = ("body", "writing", "between", "manifest", "digest")


class Numbers(Artifact):
    """Integers, one text file a shard."""


def _mark(marks: str, *words: Any) -> None:
    """One line a run of a body or writer; short appends of several processes do not mix."""
    with open(marks, "a") as file:
        file.write(" ".join(map(str, (*words, os.getpid()))) + "\n")


def write_part(directory: str, item: tuple[int, int, float, str]) -> Mapping[str, Any]:
    """Shard writer: ten numbers from `first` times `factor`, in two halves with a wait between."""
    first, factor, delay, marks = item
    _mark(marks, "writer", f"{factor}/{first}")
    words = [str(n * factor).encode() for n in range(first, first + 10)]
    with storage.open_write(storage.join(directory, "n.txt")) as file:
        file.write(b" ".join(words[:5]) + b" ")
        file.flush()
        stop.at("writing")
        time.sleep(delay)
        file.write(b" ".join(words[5:]))
    return {"count": 10}


@step(output=Numbers, version=1)
def parts(
    run: StepContext,
    *,
    factor: int,
    shards: int,
    delay: Annotated[float, Runtime],
    marks: Annotated[str, Runtime],
) -> Result:
    """The first 10 x shards integers times `factor`, through `StepContext.map`."""
    _mark(marks, "body", factor)
    stop.at("body")
    items = {f"part/{i}": (10 * i, factor, delay, marks) for i in range(shards)}
    written = run.map(write_part, items)
    stop.at("between")
    return {"count": sum(shard.result["count"] for shard in written.values())}


@step(output=Numbers, version=1)
def joined(
    run: StepContext,
    left: Numbers,
    right: Numbers,
    *,
    delay: Annotated[float, Runtime],
    marks: Annotated[str, Runtime],
) -> Result:
    """All numbers of both, sorted, through `StepContext.shard`."""
    _mark(marks, "body", "joined")
    numbers = sorted(values(left.path, left.manifest) + values(right.path, right.manifest))
    with run.shard("all") as directory:
        url = storage.join(directory, "n.txt")
        time.sleep(delay)
        with storage.open_write(url) as file:
            file.write(" ".join(map(str, numbers)).encode())
    return {"total": sum(numbers)}


def values(path: str, published: manifest.Manifest) -> list[int]:
    """The numbers of an output of this graph."""
    urls = [storage.join(path, shard.root, "n.txt") for shard in published.shards]
    return [int(word) for url in urls for word in storage.read_bytes(url).split()]


def graph(shards: int, delay: float, marks: str) -> list[Any]:
    """Three outputs, of which the last needs the others."""
    left = parts(factor=3, shards=shards, delay=delay, marks=marks)
    right = parts(factor=7, shards=shards, delay=delay, marks=marks)
    return [left, right, joined(left, right, delay=delay, marks=marks)]


class Stop:
    """Stops this process once, as SIGSTOP from outside would: all threads, in mid-step.

    Counts the storage operations of the main thread between taking a lease and creating the
    manifest, so that a trial can draw any of them.
    """

    def __init__(self) -> None:
        self.place: str | None = None
        self.operation = 0
        self.count = 0
        self.counting = False

    def at(self, place: str) -> None:
        """Stop here if this is the place that was ordered."""
        if place == self.place:
            self._now()

    def _now(self) -> None:
        self.place, self.operation = None, 0
        os.kill(os.getpid(), signal.SIGSTOP)

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, counted."""

        def counted(url: str, *rest: Any, **options: Any) -> Any:
            if self.counting and threading.current_thread() is threading.main_thread():
                self.count += 1
                publishing = url.endswith("/" + manifest.NAME) and function.__name__ == "create"
                if publishing:
                    self.at("manifest")
                if function.__name__ in ("sha256", "open_read"):
                    self.at("digest")
                if self.count == self.operation:
                    self._now()
                self.counting = not publishing
            return function(url, *rest, **options)

        return counted


stop = Stop()


class Clock:
    """A wall clock that is wrong: by an offset, set back after a while, or jumping about."""

    def __init__(self, order: Mapping[str, Any]) -> None:
        self._order = order
        self._calls = 0
        self._draw = random.Random(order.get("seed", 0))
        self._true = TRUE_TIME

    def __call__(self) -> float:
        self._calls += 1
        kind, seconds = self._order["kind"], self._order["seconds"]
        if kind == "jump":
            sign = self._draw.choice((-1, 1))
            return self._true() + sign * self._draw.uniform(seconds / 24, seconds)
        if kind == "back":
            return self._true() - seconds * (self._calls > self._order["calls"])
        return self._true() + seconds


TRUE_TIME = time.time
TRUE_HOST = process.this_host
TRUE_ACQUIRE = lease.acquire


def _patch(order: Mapping[str, Any], took: list[float]) -> None:
    for name, value in order.get("lease", {}).items():
        setattr(lease, name, value)
    clock, host, pause = order.get("clock"), order.get("host"), order.get("pause") or {}
    time.time = Clock(clock) if clock else TRUE_TIME
    process.this_host = (lambda: host) if host else TRUE_HOST
    stop.place, stop.operation = pause.get("place"), pause.get("operation", 0)
    stop.count, stop.counting = 0, False

    def acquire(*args: Any, **kwargs: Any) -> Any:
        clock = time.monotonic()
        held = TRUE_ACQUIRE(*args, **kwargs)
        took.append(time.monotonic() - clock)
        stop.counting = held is not None
        return held

    lease.acquire = acquire


def execute(order: Mapping[str, Any]) -> dict[str, Any]:
    """Bring up the ordered graph; the answer says how it went and what this process saw."""
    took: list[float] = []
    events: list[dict[str, Any]] = []
    _patch(order, took)
    store = order["store"]
    nodes = graph(order["shards"], order["delay"], order["marks"])
    wanted = [nodes[i] for i in order["targets"]]
    _wait_for(order.get("barrier"))
    started = time.monotonic()
    try:
        execution = bring_up(store, *wanted, events=events)
    except Exception:  # noqa: BLE001 - the answer carries whatever a run can raise
        return {"error": traceback.format_exc(), "operations": stop.count}
    seen = {}
    for node in map(as_node, wanted):
        path = execution.published[node.key].path
        text = storage.read_bytes(storage.join(path, manifest.NAME))
        seen[node.directory] = hashlib.sha256(text).hexdigest()
    return {
        "error": None,
        "seconds": time.monotonic() - started,
        "seen": seen,
        "waited": sum(event["event"] == "waiting" for event in events),
        "retried": sum(event["event"] == "retried" for event in events),
        "statuses": [event["status"] for event in events if event["event"] == "finished"],
        "acquire": took,
        "operations": stop.count,
        "now": time.time(),
    }


def _wait_for(barrier: str | None) -> None:
    """All start when a file appears; each says by a file of its own that it is there."""
    if barrier is None:
        return
    Path(f"{barrier}.{os.getpid()}").touch()
    while not os.path.exists(barrier):
        time.sleep(0.001)


def _orders() -> Iterator[dict[str, Any]]:
    for line in sys.stdin:
        yield json.loads(line)


def main() -> None:
    """Serve orders until stdin ends."""
    for name in OPERATIONS:
        if hasattr(storage, name):
            setattr(storage, name, stop.wrap(getattr(storage, name)))
    for order in _orders():
        sys.stdout.write(json.dumps(execute(order)) + "\n")
        sys.stdout.flush()
