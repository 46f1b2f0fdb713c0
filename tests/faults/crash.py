"""Crashes and I/O errors at every storage operation, and real kills: faults 1, 2, 3 and 4.

One small graph with a fan-out, a single-shard step and a result-only step is brought up, disturbed,
checked, and brought up again to the end. The end must be that of an undisturbed run, and what was
recorded before the disturbance must not have been written again.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from pipeline.errors import PonenteError
from pipeline.graph.order import topological
from pipeline.graph.step import as_node
from pipeline.store import lease, storage
from pipeline.store.garbage import delete, find_garbage
from pipeline.store.manifest import load
from pipeline.store.outputs import Store
from tests.faults import disk
from tests.faults.disk import Killed, Life, Operation, Trouble
from tests.faults.registry import Fault, pick, trials
from tests.pipeline.helpers import bring_up, check_invariants, recorded, temporaries
from tests.pipeline.toy import Scale, numbers, scaled, total

ROOT = Path(__file__).parents[2]
ALL = 1_000_000
STEPS = 3


def graph() -> Any:
    """A fan-out of three shards, one shard made from them, and a sum of both."""
    source = numbers(count=9, shards=3)
    return total(source, scaled(source, scale=Scale(3)))


def outputs(store: str) -> dict[str, Any]:
    """What a store's readers see, by step: the result, and the bytes of every file."""
    found = {}
    for name in storage.list_names(store):
        path = storage.join(store, name)
        published = load(path)
        if published is not None:
            content = {
                f"{shard.name}/{file.path}": storage.read_bytes(
                    storage.join(path, shard.root, file.path)
                )
                for shard in published.shards
                for file in shard.files
            }
            found[published.label] = (published.result, content)
    return found


@dataclass
class Lived:
    """How a life ended: killed, with an error, or (neither) well."""

    life: Life
    killed: bool
    error: Exception | None
    events: list[dict[str, Any]]


def live(store: str, trouble: Trouble | None = None, *, count_reads: bool = False) -> Lived:
    """One run of the graph in one life on a disk with this trouble."""
    life, events = Life(store, trouble, count_reads=count_reads), []
    killed, error = False, None
    with life:
        try:
            bring_up(store, graph(), events=events)
        except Killed:
            killed = True
        except Exception as caught:  # noqa: BLE001 - the trial judges it
            error = caught
    assert killed == life.dead, "a dead process went on to the end"
    check_reads(life, store)
    return Lived(life, killed, error, events)


def check_reads(life: Life, store: str) -> None:
    """No data was opened but of finished shards and of the attempts this life made itself."""
    finished = {
        f"{directory}/{shard.root}/{file.path}"
        for (directory, _), shard in recorded(store).items()
        for file in shard.files
    }
    own = disk.attempts_written(life)
    for path in disk.data_read(life) - finished:
        assert "/".join(path.split("/")[:3]) in own, f"read {path}, which nothing refers to"


def check_not_rewritten(life: Life, before: dict[tuple[str, str], Any], store: str) -> None:
    """No shard with a record in `before` was written in this life, and the records stand."""
    after = recorded(store)
    for (directory, root), shard in before.items():
        assert after[directory, root] == shard, f"another record of {directory} {shard.name}"
        again = [
            path
            for path in disk.data_written(life)
            if path.startswith(directory + "/") and f"/shards/{shard.name}/" in path
        ]
        assert not again, f"a finished shard was written again: {again}"


@dataclass(frozen=True)
class Reference:
    """An undisturbed run: what came out, and every operation it took."""

    outputs: dict[str, Any]
    operations: list[Operation]


def undisturbed(workspace: Path, *, count_reads: bool = False) -> Reference:
    """Run the graph on a good disk, twice: the second time nothing is executed."""
    store = str(workspace / "undisturbed")
    lived = live(store, count_reads=count_reads)
    assert lived.error is None, lived.error
    assert check_invariants(store, finished=True) == STEPS
    assert not temporaries(store)
    assert not disk.data_written(live(store).life)
    return Reference(outputs(store), lived.life.operations)


def finish(store: str, reference: Reference, kills: int) -> int:
    """Run to the end on a good disk, check everything, and delete the store.

    `kills` lives may each have left a temporary file. Returns how many there were.
    """
    before = recorded(store) if os.path.exists(store) else {}
    lived = live(store)
    if lived.error is not None:
        raise lived.error
    # What a life killed between its manifest and its clearing up has left is for gc.
    delete(Store(store), find_garbage(Store(store), topological([as_node(graph())])).garbage)
    assert check_invariants(store, finished=True) == STEPS
    assert outputs(store) == reference.outputs, "the outputs differ from an undisturbed run's"
    check_not_rewritten(lived.life, before, store)
    assert not [e for e in lived.events if e["event"] == "waiting"], "waited for a dead process"
    left = temporaries(store)
    assert len(left) <= kills, f"temporary files left: {left}"
    shutil.rmtree(store)
    return len(left)


def _modes(operation: Operation) -> tuple[str, ...]:
    return ("before", "torn", "after") if operation.kind == "write" else ("before", "after")


def _check_after_crash(store: str) -> None:
    if os.path.exists(store):
        check_invariants(store)


def crash_everywhere(seed: int, count: int, workspace: Path) -> dict[str, Any]:
    """Fault 2: killed before, in the middle of, and after each operation of a whole run."""
    reference = undisturbed(workspace)
    points = [(k, m) for k, o in enumerate(reference.operations, 1) for m in _modes(o)]
    left = []

    def trial(number: int) -> None:
        at, mode = points[pick(number, len(points))]
        store = str(workspace / f"store-{number}")
        assert live(store, Trouble(at, mode)).killed, f"no operation {at}"
        _check_after_crash(store)
        left.append(finish(store, reference, kills=1))

    made = trials(seed, min(count, len(points)), trial)
    operations = len(reference.operations)
    return {"trials": made, "operations": operations, "points": len(points), "temp": sum(left)}


def crash_twice(seed: int, count: int, workspace: Path) -> dict[str, Any]:
    """Fault 4: killed at a random operation, and again at a random one of the recovery."""
    reference = undisturbed(workspace)
    length = len(reference.operations)
    second, left = [], []

    def trial(number: int) -> None:
        draw = random.Random(number)
        store = str(workspace / f"store-{number}")
        at = draw.randint(1, length)
        first = Trouble(at, draw.choice(("before", "torn", "after")))
        assert live(store, first).killed, f"no operation {at}"
        _check_after_crash(store)
        before = recorded(store) if os.path.exists(store) else {}
        again = Trouble(draw.randint(1, length - at + 10), draw.choice(("before", "torn", "after")))
        lived = live(store, again)
        assert lived.error is None, lived.error
        second.append(lived.killed)
        _check_after_crash(store)
        check_not_rewritten(lived.life, before, store)
        left.append(finish(store, reference, kills=2))

    made = trials(seed, count, trial)
    return {"trials": made, "killed_twice": sum(second), "temp": sum(left)}


_ERRORS: tuple[tuple[str, Callable[[str], OSError], tuple[str, ...]], ...] = (
    ("EIO", lambda path: OSError(errno.EIO, "Input/output error", path), ()),
    (
        "ENOSPC",
        lambda path: OSError(errno.ENOSPC, "No space left on device", path),
        ("unlink", "remove", "rmdir", "read", "stat", "lstat", "scandir", "listdir"),
    ),
    ("reset", lambda path: ConnectionResetError(errno.ECONNRESET, "reset by peer", path), ()),
)


def io_errors(seed: int, count: int, workspace: Path) -> dict[str, Any]:
    """Fault 3: each operation of a run, readings too, fails with an I/O error.

    Once before it is done (half of it, for a write), once though it was done, and from there on.
    """
    reference = undisturbed(workspace, count_reads=True)
    operations = reference.operations
    points = [(k, v) for k in range(1, len(operations) + 1) for v in ("once", "late", "sticky")]
    survived: dict[str, int] = {"retried": 0, "refused": 0}

    def trial(number: int) -> None:
        index = pick(number, len(points))
        at, variant = points[index]
        reading = operations[at - 1].kind in _ERRORS[1][2]
        name, error, spared = _ERRORS[(0, 2)[number % 2] if reading else number % 3]
        mode = "after" if variant == "late" else "torn"
        trouble = Trouble(at, mode, error, variant == "sticky", spared)
        store = str(workspace / f"store-{number}")
        what = f"{name} {variant} at {at}, {operations[at - 1].kind} {_short(operations[at - 1])}"
        try:
            survived[_with_error(store, trouble, reference)] += 1
        except Exception as caught:
            raise AssertionError(f"{what}: {type(caught).__name__}: {caught}") from caught

    with mock.patch.object(lease, "STALE_SECONDS", 0.2):
        made = trials(seed, min(count, len(points)), trial)
    return {"trials": made, "operations": len(operations), "points": len(points), **survived}


def _short(operation: Operation) -> str:
    return "/".join(operation.path.split("/")[-3:])


def _with_error(store: str, trouble: Trouble, reference: Reference) -> str:
    """One life with the error and, where that failed, one without; says how the first ended."""
    lived = live(store, trouble, count_reads=True)
    assert lived.life.struck, "the error did not happen"
    _check_after_crash(store)
    error = lived.error
    if error is None:
        assert outputs(store) == reference.outputs, "the outputs differ"
        assert trouble.sticky or not temporaries(store), f"left: {temporaries(store)}"
    else:
        assert isinstance(error, PonenteError), f"an error of no type of ours: {error!r}"
        assert store in str(error), f"the error names no path: {error}"
        assert trouble.sticky, f"one error was not retried: {error}"
        failed = str(error).removeprefix("step ").split(" ")[0]
        assert failed not in outputs(store), f"{failed} is published and said to have failed"
    finish(store, reference, kills=1 if trouble.sticky else 0)
    return "retried" if error is None else "refused"


def victim(store: str) -> None:
    """Run the graph slowly in this process, saying first that it begins."""
    sys.stdout.write("begin\n")
    sys.stdout.flush()
    with Life(store, delay=0.002):
        bring_up(store, graph())


def _start(store: str) -> subprocess.Popen[str]:
    code = "import sys; from tests.faults.crash import victim; victim(sys.argv[1])"
    process = subprocess.Popen(
        [sys.executable, "-c", code, store], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    if process.stdout is None or process.stdout.readline() != "begin\n":
        process.kill()
        raise AssertionError("the process did not begin")
    return process


def kill_process(seed: int, count: int, workspace: Path) -> dict[str, Any]:
    """Fault 1: a real process, killed by signal 9 at a random moment of its run."""
    reference = undisturbed(workspace)
    with _start(str(workspace / "whole")) as process:
        clock = time.monotonic()
        assert process.wait(120) == 0
        length = time.monotonic() - clock
    assert outputs(str(workspace / "whole")) == reference.outputs
    killed, halfway = [], []

    def trial(number: int) -> None:
        store = str(workspace / f"store-{number}")
        with _start(store) as process:
            time.sleep(random.Random(number).uniform(0, length))
            process.send_signal(signal.SIGKILL)
            killed.append(process.wait(60) == -signal.SIGKILL)
        _check_after_crash(store)
        halfway.append(0 < len(outputs(store)) < STEPS if os.path.exists(store) else False)
        finish(store, reference, kills=1)

    made = trials(seed, count, trial)
    assert count < 10 or sum(killed) > count / 2, "hardly any process was running when killed"
    return {"trials": made, "killed": sum(killed), "between_steps": sum(halfway)}


FAULTS: dict[int, list[Fault]] = {
    1: [Fault("kill -9 of the pipeline at a random moment", 6, 200, kill_process)],
    2: [Fault("crash at every storage operation", 50, ALL, crash_everywhere)],
    3: [Fault("I/O error at every storage operation, once and for good", 25, ALL, io_errors)],
    4: [Fault("crash, and a crash during the recovery", 20, 500, crash_twice)],
}
