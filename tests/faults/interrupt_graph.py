"""A small graph whose steps take a while and mark what they do; a gang that saves when asked."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pipeline import GangProcess, Result, Runtime, StepContext, pod, step
from pipeline.errors import WorkerLost
from pipeline.events import Emit
from pipeline.store import storage
from tests.pipeline.toy import Numbers, Total, total

SHARDS = 12
WAIT_SECONDS = 60.0
# What a user would write; the steps are in a module that workers can import.
EXPERIMENT = """
from pipeline import Experiment
from tests.faults.interrupt_graph import build

experiment = Experiment(build)
if __name__ == "__main__":
    experiment.main()
"""


def mark(word: str) -> None:
    """Note that something happened; a line is written at once or not at all."""
    with open(os.environ["PONENTE_MARKS"], "a") as file:
        file.write(f"{word}\n")


def write_slowly(directory: str, item: tuple[int, float]) -> Mapping[str, Any]:
    """Shard writer that says when it begins and when it has ended."""
    number, seconds = item
    mark(f"begin {number:03d}")
    time.sleep(seconds)
    storage.write_atomic(storage.join(directory, "n.txt"), str(number).encode())
    mark(f"end {number:03d}")
    return {"count": 1}


@step(output=Numbers, version=1)
def slow_numbers(
    run: StepContext, *, shards: int, seconds: Annotated[float, Runtime] = 0
) -> Result:
    written = run.map(write_slowly, {f"part/{i:03d}": (i, seconds) for i in range(shards)})
    return {"count": len(written)}


@step(output=Numbers, version=1)
def doubled(
    run: StepContext, numbers: Numbers, *, seconds: Annotated[float, Runtime] = 0
) -> Result:
    if "all" not in run.finished():
        with run.shard("all") as directory:
            mark("begin all")
            time.sleep(3 * seconds)
            text = " ".join(str(2 * n) for n in numbers.values())
            storage.write_atomic(storage.join(directory, "n.txt"), text.encode())
            mark("end all")
    return {"count": len(numbers.values())}


def wait_to_be_asked(job: str, *, process: GangProcess, emit: Emit) -> bool:
    """Wait for SIGTERM, save, and say so; go on at once from what was saved."""
    del process, emit
    saved, asked = Path(job), []
    if saved.exists():
        return True
    before = signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    try:
        mark("gang waits")
        deadline = time.monotonic() + WAIT_SECONDS
        while not asked and time.monotonic() < deadline:
            time.sleep(0.02)
    finally:
        signal.signal(signal.SIGTERM, before)
    if asked:
        saved.touch()
    return False


@step(output=Total, version=1, cpus=0)
def patient(run: StepContext, *, hardware: Annotated[str, Runtime] = "local") -> Result:
    """A gang that ends early, as training does, when it is asked to save."""
    job = os.environ["PONENTE_MARKS"] + ".saved"
    if not run.gang(pod(hardware), wait_to_be_asked, job):
        raise WorkerLost("preempted, after saving")
    return {"saved": True}


def build(gang: str = "", seconds: float = 0.3) -> Any:
    """The gang alone, or a fan-out, a single shard made of it, and a sum of both."""
    if gang:
        return patient(hardware=gang)
    source = slow_numbers(shards=SHARDS, seconds=seconds)
    return total(source, doubled(source, seconds=seconds))
