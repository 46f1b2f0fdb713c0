"""A step that saves when it is stopped, as training does, and resumes from what it saved."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Annotated, Any

from pipeline import Experiment, GangProcess, Result, Runtime, StepContext, local, pod, step
from pipeline.errors import Preempted
from pipeline.events import Emit
from pipeline.store import storage
from tests.faults.interrupt_graph import mark
from tests.pipeline.toy import Total

WAIT_SECONDS = 120.0


def marks() -> list[str]:
    path = Path(os.environ["PONENTE_MARKS"])
    return path.read_text().splitlines() if path.exists() else []


def save_when_asked(job: tuple[str, int], *, process: GangProcess, emit: Emit) -> None:
    del process, emit
    asked: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    mark("waits")
    deadline = time.monotonic() + WAIT_SECONDS
    while not asked and time.monotonic() < deadline:
        time.sleep(0.02)
    mark("saves")
    for number in range(job[1]):
        storage.write_atomic(storage.join(job[0], f"weights-{number}.bin"), b"weights")
    mark("saved")
    signal.signal(signal.SIGTERM, before)


@step(output=Total, version=1, cpus=0)
def saver(
    run: StepContext,
    *,
    files: Annotated[int, Runtime] = 2,
    hardware: Annotated[str, Runtime] = "local",
) -> Result:
    if "state" in run.finished():
        return {"total": 1}
    with run.shard("state") as directory:
        place = local() if hardware == "local" else pod(hardware)
        run.gang(place, save_when_asked, (directory, files))
    raise Preempted("preempted after step 3")


def saving(files: int = 2, hardware: str = "local") -> Any:
    return saver(files=files, hardware=hardware)


experiment = Experiment(saving)
if __name__ == "__main__":
    experiment.main()
