"""An experiment of one gang, which writes down where its processes ran."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated, Any

import ray

from pipeline import Experiment, GangProcess, Result, Runtime, StepContext, pod, step
from pipeline.events import Emit, Progress
from pipeline.graph.hardware import Hardware
from tests.pipeline.toy import Total


def introduce(job: dict[str, Any], *, process: GangProcess, emit: Emit) -> dict[str, Any]:
    """Write down the process, its host, slice, devices and node; wait until all have.

    One that is to stay does so until there is a file "go" beside the directory.
    """
    directory = Path(job["directory"])
    node = ray.get_runtime_context().get_node_id()
    chips = os.environ["XLA_FLAGS"].rpartition("=")[2]
    worker = os.environ.get("TPU_WORKER_ID", "")
    slices = [os.environ.get(f"MEGASCALE_{name}", "-") for name in ("NUM_SLICES", "SLICE_ID")]
    words = [str(process.count), worker, *slices, chips, os.environ.get("TPU_NAME", ""), node]
    (directory / f"{process.index}").write_text(" ".join(words))
    emit(Progress(1, 1, "processes"))
    go = directory.with_name("go")
    while len(list(directory.iterdir())) < process.count or (job["stay"] and not go.exists()):
        time.sleep(0.05)
    return {"processes": process.count}


@step(output=Total, version=1, cpus=0)
def gang(
    run: StepContext,
    *,
    directory: Annotated[str, Runtime],
    hardware: Annotated[Hardware, Runtime],
    stay: Annotated[bool, Runtime] = False,
) -> Result:
    job = {"directory": directory, "stay": stay}
    return dict(run.gang(hardware, introduce, job))


def on_hosts(directory: str = "", hardware: str = "v6e-16", stay: bool = False) -> Any:
    return gang(directory=directory, hardware=pod(hardware), stay=stay)


experiment = Experiment(on_hosts)
