"""A TPU slice of four hosts as Ray sees one, made of nodes on this machine; and gangs on it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Annotated, Any

import ray

from pipeline import GangProcess, Result, Runtime, StepContext, pod, step
from pipeline.events import Emit, Progress
from pipeline.launch.host import Host
from tests.pipeline.execute import cluster as several
from tests.pipeline.toy import Total

NAME = "slice-a"
HOSTS = 4


def add_slice(cluster: Any) -> None:
    """Add the four hosts of one v6e-16 slice: resources, labels, and the environment of each."""
    for number in range(HOSTS):
        host = Host(pod("v6e-16"), number, NAME)
        about = {"resources": host.resources, "labels": host.labels, "env_vars": host.variables}
        several.add(cluster, cpus=1, **about, wait=number == HOSTS - 1)
    cluster.wait_for_nodes()


def introduce(job: dict[str, Any], *, process: GangProcess, emit: Emit) -> dict[str, Any]:
    """Writes down which process and which host this is; `dies` kills itself the first time."""
    directory, flag = Path(job["directory"]), Path(job["directory"] + ".died")
    node = ray.get_runtime_context().get_node_id()
    said = f"{process.index} {process.count} {process.coordinator} {os.environ['TPU_WORKER_ID']}"
    (directory / f"{process.index}-{os.getpid()}").write_text(f"{said} {node}")
    emit(Progress(process.index, process.count, "processes"))
    while job["dies"] >= 0 and not flag.exists():
        if job["dies"] == process.index and len(list(directory.iterdir())) == process.count:
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.05)
    if len(list(directory.iterdir())) == process.count and flag.exists():
        time.sleep(600)  # as if it waited for the one that died
    return {"index": process.index, "coordinator": process.coordinator}


@step(output=Total, version=1, cpus=0, tries=2)
def on_pod(
    run: StepContext,
    *,
    name: str,
    directory: Annotated[str, Runtime],
    dies: Annotated[int, Runtime] = -1,
) -> Result:
    return dict(run.gang(pod("v6e-16"), introduce, {"directory": directory, "dies": dies}))
