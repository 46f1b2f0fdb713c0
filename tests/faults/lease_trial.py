"""What the lease trials share: worker processes, one race, and what must hold after it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.graph.step import as_node
from pipeline.store import lease, manifest, process
from tests.faults.lease_worker import graph, values
from tests.pipeline.helpers import check_invariants

ROOT = Path(__file__).parents[2]
DEADLINE_SECONDS = 120.0
# Short enough for a trial, long enough that a busy machine does not silence a live holder.
QUICK = {"STALE_SECONDS": 1.0, "BEAT_SECONDS": 0.1, "LOOK_SECONDS": 0.02}
_START = "from {} import main; main()"


class Worker:
    """One executor process that takes orders (see `lease_worker`, or another `module`)."""

    def __init__(self, workspace: Path, name: str, module: str) -> None:
        self._errors = workspace / f"{name}.stderr"
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START.format(module)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors.open("a"),
            text=True,
        )
        self._answers: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    def _read(self) -> None:
        for line in self._process.stdout or ():
            self._answers.put(line)
        self._answers.put("")

    def order(self, order: dict[str, Any]) -> None:
        """Send one order."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def answer(self, trial: str) -> dict[str, Any]:
        """The answer to the oldest order; AssertionError naming the trial when none comes."""
        try:
            line = self._answers.get(timeout=DEADLINE_SECONDS)
        except queue.Empty:
            raise AssertionError(f"{trial}: wedged for {DEADLINE_SECONDS:.0f} s") from None
        assert line, f"{trial}: the executor died: {self._errors.read_text()[-2000:]}"
        return json.loads(line)

    def wait_until_stopped(self, trial: str) -> bool:
        """Wait for the process to stop itself; False when it answered without stopping."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while time.monotonic() < deadline:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
            if stat.rpartition(")")[2].split()[0] == "T":
                return True
            if not self._answers.empty():
                return False
            time.sleep(0.005)
        raise AssertionError(f"{trial}: neither stopped nor answered")

    @property
    def answered(self) -> bool:
        """Whether an answer is there that was not read."""
        return not self._answers.empty()

    def signal(self, number: int) -> None:
        """Send a signal to the process."""
        os.kill(self.pid, number)

    def resume(self) -> None:
        """Let a stopped process continue."""
        self.signal(signal.SIGCONT)

    def close(self) -> None:
        """End the process, stopped or not."""
        self._process.kill()
        self._process.wait()
        self._reader.join()


@contextlib.contextmanager
def workers(
    workspace: Path, count: int, module: str = "tests.faults.lease_worker"
) -> Iterator[list[Worker]]:
    """That many workers; all are ended on leaving."""
    started: list[Worker] = []
    try:
        for i in range(count):
            started.append(Worker(workspace, f"worker-{i}", module))
        yield started
    finally:
        for worker in started:
            worker.close()


@contextlib.contextmanager
def quick_leases() -> Iterator[None]:
    """The leases of this process expire quickly in the block."""
    before = {name: getattr(lease, name) for name in QUICK}
    for name, value in QUICK.items():
        setattr(lease, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(lease, name, value)


@dataclass
class Trial:
    """One store, the graph that is brought up in it, and its seed for messages.

    Attributes:
        name: fault and seed; every message starts with it.
        store: an empty directory.
        shards, delay: of the graph; `delay` seconds pass within each shard.
        takeovers: takeovers that a trial itself brings about.
    """

    name: str
    store: Path
    shards: int = 3
    delay: float = 0.0
    targets: list[int] = field(default_factory=lambda: [0, 1, 2])

    def __post_init__(self) -> None:
        self.store.mkdir(parents=True)
        self.marks = self.store.with_suffix(".marks")
        self.marks.touch()
        self.nodes = [as_node(n) for n in graph(self.shards, self.delay, str(self.marks))]

    def root(self, index: int) -> Path:
        """Directory of one output."""
        return self.store / self.nodes[index].directory

    def order(self, **changes: Any) -> dict[str, Any]:
        """The order to bring this graph up."""
        return {
            "store": str(self.store),
            "shards": self.shards,
            "delay": self.delay,
            "marks": str(self.marks),
            "targets": self.targets,
            **changes,
        }

    def start(self, racing: list[Worker], orders: list[dict[str, Any]]) -> None:
        """Send the orders and let all go at once, on a file barrier."""
        barrier = self.store.with_suffix(".go")
        for worker, order in zip(racing, orders, strict=True):
            worker.order({**order, "barrier": str(barrier)})
        deadline = time.monotonic() + DEADLINE_SECONDS
        while len(list(barrier.parent.glob(barrier.name + ".*"))) < len(racing):
            assert time.monotonic() < deadline, f"{self.name}: not all came to the barrier"
            time.sleep(0.001)
        barrier.touch()

    def race(self, racing: list[Worker], orders: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Start together, wait for all, check everything; the answers."""
        self.start(racing, orders)
        answers = [worker.answer(self.name) for worker in racing]
        self.check(answers)
        return answers

    def takeovers(self, index: int) -> int:
        """Leases of an output whose record says they were taken from a holder."""
        paths = (self.root(index) / "leases").glob("*.json")
        # What a trial put there itself need not be a record, nor a file.
        owners = [lease.read_owner(str(path)) for path in paths]
        ours = [owner["previous"] for owner in owners if "previous" in owner]
        return sum(previous not in ("never taken", "released") for previous in ours)

    def published(self, index: int) -> manifest.Manifest:
        """The manifest of one output."""
        found = manifest.load(str(self.root(index)))
        assert found is not None, f"{self.name}: {self.nodes[index].label} was not published"
        return found

    def check(self, answers: list[dict[str, Any]]) -> None:
        """What must hold after any disturbance; AssertionError naming the trial otherwise."""
        wrong: list[str] = []
        for answer in answers:
            if answer["error"]:
                raise AssertionError(f"{self.name}: an executor failed:\n{answer['error']}")
        for i in self.targets:
            text = (self.root(i) / manifest.NAME).read_bytes()
            now = hashlib.sha256(text).hexdigest()
            wrong += [
                f"{self.nodes[i].directory} was replaced after an executor had seen it"
                for answer in answers
                if answer["seen"].get(self.nodes[i].directory, now) != now
            ]
            if values(str(self.root(i)), self.published(i)) != self.expected(i):
                wrong.append(f"{self.nodes[i].directory} has other numbers than it should")
        records = len(list(self.store.rglob(manifest.NAME)))
        if records != len(self.targets) or check_invariants(str(self.store)) != records:
            wrong.append(f"{records} records of {len(self.targets)} outputs")
        wrong += self._leftovers() + self._repeated()
        assert not wrong, f"{self.name}: " + "; ".join(wrong)

    def expected(self, index: int) -> list[int]:
        """The numbers of an output, computed without the engine."""
        left, right = ([k * n for n in range(10 * self.shards)] for k in (3, 7))
        return (left, right, sorted(left + right))[index]

    def _leftovers(self) -> list[str]:
        """Temporary files, and data of attempts that no manifest refers to."""
        found = [f"temporary file {path.name} is left" for path in self.store.rglob("*.tmp")]
        for i in self.targets:
            roots = [self.root(i) / shard.root for shard in self.published(i).shards]
            for attempt in (self.root(i) / "attempts").iterdir():
                if not any(root.is_relative_to(attempt) for root in roots):
                    data = [p for p in attempt.rglob("*") if p.is_file() and p.name != "log.txt"]
                    found += [f"discarded attempt still holds {path}" for path in data]
        return found

    def _repeated(self) -> list[str]:
        """Bodies and writers that ran twice though no takeover accounts for it."""
        ran = Counter(line.rsplit(" ", 1)[0] for line in self.marks.read_text().splitlines())
        allowed = {label: 1 + self.takeovers(i) for i, label in enumerate(("3", "7", "joined"))}
        return [
            f"{what} ran {times} times, {allowed[what.split()[1].split('/')[0]]} allowed"
            for what, times in ran.items()
            if times > allowed[what.split()[1].split("/")[0]]
        ]

    def remove(self) -> None:
        """Delete the store of a trial that held."""
        shutil.rmtree(self.store)
        for path in self.store.parent.glob(self.store.name + ".*"):
            path.unlink()


def write_lease(root: Path, number: int, owner: dict[str, Any] | str | bytes) -> Path:
    """Put a lease record there as if somebody had taken it; returns its path without suffix."""
    base = root / "leases" / f"{number:06d}"
    base.parent.mkdir(parents=True, exist_ok=True)
    data = json.dumps(owner) if isinstance(owner, dict) else owner
    base.with_suffix(".json").write_bytes(data.encode() if isinstance(data, str) else data)
    return base


def owner_here(pid: int) -> dict[str, Any]:
    """The record a process of this host would write."""
    return {"host": process.this_host(), "pid": pid, "process_start": process.start_of(pid)}
