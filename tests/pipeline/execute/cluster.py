"""A Ray cluster of several nodes on this machine, and steps that say where they ran."""

from __future__ import annotations

import collections
import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import ray
from ray.cluster_utils import Cluster

import pipeline
from pipeline import Result, Runtime, StepContext, step
from pipeline.store import storage
from tests.pipeline.toy import Numbers, Total

ROOT = Path(__file__).parents[3]
_MEGABYTE = 2**20
_SIZE = 10
CORES = 5  # of the head and two nodes
FREE = 3  # shards that do not wait for the gate


class _Cluster(Cluster):
    """A cluster whose nodes have a folder each.

    Nodes that share one unpack the code there again while another's workers import it.
    """

    def __init__(self, **options: Any) -> None:
        self._folders: list[str] = []
        super().__init__(**options)

    def folder(self) -> str:
        """A new one, in /tmp: names of sockets end at 107 characters."""
        self._folders.append(tempfile.mkdtemp(prefix="ray-node-", dir="/tmp"))
        return self._folders[-1]

    def shutdown(self) -> None:
        super().shutdown()
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)


def start() -> _Cluster:
    """A head with one core; nodes are added by `add`. Import paths are the checkout's."""
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    os.environ["PYTHONPATH"] = str(ROOT)  # for `tests`, which is not sent to workers
    head = {
        "num_cpus": 1,
        "include_dashboard": False,
        "object_store_memory": 80 * _MEGABYTE,
        "_system_config": {"prestart_worker_first_driver": False},
    }
    return _Cluster(initialize_head=True, head_node_args=head)


def add(cluster: _Cluster, cpus: int = 2, **options: Any) -> Any:
    """Add a node where bodies of `fanned` have room, unless other resources are given."""
    return cluster.add_node(
        num_cpus=cpus,
        resources=options.pop("resources", {"room": 1}),
        object_store_memory=80 * _MEGABYTE,
        temp_dir=cluster.folder(),
        **options,
    )


def processes(node: Any) -> list[int]:
    """Process ids of a node: its raylet and everything below it."""
    (raylet,) = node.all_processes["raylet"]
    children = collections.defaultdict(list)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue  # it has ended
        children[parent].append(int(stat.parent.name))
    found = [raylet.process.pid]
    for pid in found:
        found += children[pid]
    return found


def freeze(node: Any) -> list[int]:
    """Stop all processes of a node, which then neither answer nor end; returns their ids."""
    frozen: list[int] = []
    while new := [pid for pid in processes(node) if pid not in frozen]:
        for pid in new:
            os.kill(pid, signal.SIGSTOP)
        frozen += new
    return frozen


def kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def thaw(frozen: list[int]) -> None:
    for pid in frozen:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _mark(marks: str, what: str) -> None:
    if marks:
        node = ray.get_runtime_context().get_node_id()
        with open(marks, "a") as file:
            file.write(f"{what} {node}\n")


def open_gate(marks: str) -> None:
    Path(f"{marks}.open").touch()


def write_marked(directory: str, item: tuple[int, str]) -> Mapping[str, Any]:
    """Shard writer: marks its run and writes ten numbers; of a marked run, most wait for a gate."""
    first, marks = item
    _mark(marks, f"part/{first:03d}")
    while marks and first >= FREE * _SIZE and not Path(f"{marks}.open").exists():
        time.sleep(0.05)
    with storage.open_write(storage.join(directory, "n.txt")) as file:
        file.write(" ".join(str(n) for n in range(first, first + _SIZE)).encode())
    return {"count": _SIZE}


@step(output=Numbers, version=1, cpus=0, custom={"room": 0.1})
def fanned(run: StepContext, *, shards: int, marks: Annotated[str, Runtime] = "") -> Result:
    _mark(marks, "body")
    items = {f"part/{i * _SIZE:03d}": (i * _SIZE, marks) for i in range(shards)}
    written = run.map(write_marked, items)
    return {"count": sum(s.result["count"] for s in written.values())}


@step(output=Total, version=1, cpus=0, custom={"stale": 0.1})
def imported(run: StepContext, *, number: int) -> Result:
    """Which file the worker's `pipeline` is; a number of ours tells runs apart."""
    return {"file": pipeline.__file__, "number": number}


def runs(marks: str) -> Iterator[tuple[str, str]]:
    """(what began, id of the node it began on) for every mark, in order."""
    for line in Path(marks).read_text().splitlines() if Path(marks).exists() else ():
        what, node = line.split()
        yield what, node
