"""Ray on this host (`ray start`), and the head's view of its hosts: one Ray task on each."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from pipeline.errors import InputError, WorkerLost
from pipeline.execute.ray.runtime_env import STARTING
from pipeline.launch.host import LABEL, Host, differences, software

ENDED = "PONENTE_ENDED"  # the file to which a Ray task on this host writes the run's status
_STOP_SECONDS = 15.0
_LOOK_SECONDS = 1.0
_TASK_SECONDS = 60.0  # a worker starts on a machine that may just have booted
_END_SECONDS = 20.0


class RayNode:
    """Ray's processes on this host; the context ends them at its exit.

    `host` is None for a head outside the hardware, `first` whether this is the head. With `imitate`
    chips are imitated on CPUs, and this is one of several hosts of one machine.
    """

    def __init__(
        self, head: tuple[str, int], host: Host | None, *, first: bool, imitate: bool
    ) -> None:
        # Under /tmp: the path of a socket in it has at most 107 characters.
        self._folder = Path(tempfile.mkdtemp(prefix="ponente-", dir="/tmp"))
        self._log, self._ended = self._folder / "log", self._folder / "ended"
        environment = {**STARTING, **os.environ, ENDED: str(self._ended)}
        words = _command(head, host, first=first)
        if imitate:
            # Nodes of one cluster on one machine choose the same socket when they start at the same
            # time in one folder.
            words += [f"--temp-dir={self._folder}", "--num-cpus=1", "--min-worker-port=0"]
            words += ["--max-worker-port=0", "--dashboard-agent-listen-port=0"]
            words += [f"--object-store-memory={80 * 2**20}"]
            words += [] if first else [f"--node-ip-address={head[0]}"]
        if host is not None:
            environment |= host.variables
        if imitate and host is not None:
            count = f"--xla_force_host_platform_device_count={host.hardware.devices_per_process}"
            environment["JAX_PLATFORMS"] = "cpu"
            environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} {count}".strip()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # Ctrl-C is for the run, which ends before Ray does
            )

    def __enter__(self) -> RayNode:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def ended(self) -> int | None:
        """The run's exit status, which the head sends to every host; None while it runs."""
        text = self._ended.read_text() if self._ended.exists() else ""
        return int(text) if text else None

    def check(self) -> None:
        """Raise `WorkerLost` with the last lines of Ray's log if Ray has ended."""
        if self._process.poll() is not None:
            lines = self._log.read_text(errors="replace").split("\n")
            last = " ".join(" ".join([x for x in lines if x.strip()][-4:]).split())[-400:]
            raise WorkerLost(f"join: Ray ended on this host: {last}")


def _command(head: tuple[str, int], host: Host | None, *, first: bool) -> list[str]:
    address, port = head
    words = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
    words += ["--disable-usage-stats", "--include-log-monitor=false"]
    if first:
        words += ["--head", f"--node-ip-address={address}", f"--port={port}"]
        words += ["--include-dashboard=false"]
    else:
        words += [f"--address={address}:{port}"]
    if host is not None:
        words += [f"--resources={json.dumps(host.resources)}"]
        words += [f"--labels={','.join(f'{k}={v}' for k, v in host.labels.items())}"]
        if host.hardware.kind == "gpu":
            words += [f"--num-gpus={host.hardware.chips_per_process}"]
    return words


@contextlib.contextmanager
def connected(head: tuple[str, int]) -> Iterator[None]:
    """While the block runs, this process is a driver of the cluster."""
    import ray

    handler = signal.getsignal(signal.SIGTERM)  # Ray sets its own
    ray.init(f"{head[0]}:{head[1]}", log_to_driver=False, logging_level=logging.ERROR)
    signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        ray.shutdown()


def alive() -> dict[str, tuple[int, str]]:
    """The cluster's nodes that are hosts: (number, machine) by Ray's id."""
    import ray

    return {
        node["NodeID"]: (int(node["Labels"][LABEL]), node["NodeManagerHostname"])
        for node in ray.nodes()
        if node["Alive"] and LABEL in node["Labels"]
    }


def on_each(
    nodes: Iterable[str], seconds: float, function: Callable[..., Any], *given: Any
) -> Iterator[tuple[str, Any]]:
    """Run a function as a Ray task on each node; (node, result or what was raised), as they come.

    Nodes that are lost, or do not answer within `seconds`, are left out.
    """
    import ray
    from ray.exceptions import RayError, RayTaskError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as Affinity

    task: Any = ray.remote(num_cpus=0, max_retries=0)(function)
    running = {
        task.options(scheduling_strategy=Affinity(node, soft=False)).remote(*given): node
        for node in nodes
    }
    deadline = time.monotonic() + seconds
    while running:
        ready, _ = ray.wait(list(running), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            return
        node = running.pop(ready[0])
        try:
            yield node, ray.get(ready[0])
        except RayTaskError as error:  # such as a module that this host lacks
            yield node, error
        except RayError:
            continue


def leave(status: int) -> None:
    """Tell the `join` of the host that this runs on that the run has ended."""
    Path(os.environ[ENDED]).write_text(str(status))


class Hosts:
    """The hosts that have to join and to stay, by number; `tell` prints a line about one."""

    def __init__(self, count: int, tell: Callable[[str], None]) -> None:
        self._count, self._tell = count, tell
        self._software = software()[0]
        self._nodes: dict[str, tuple[int, str]] = {}  # those alive that have joined
        self._seen = [0.0] * count
        self._since = 0.0  # when the first host was seen after none was

    def look(self) -> set[int]:
        """The numbers of the hosts that are there; `InputError` if a new one differs."""
        found = alive()
        nodes = {node: about for node, about in found.items() if node in self._nodes}
        for node, answer in on_each(found.keys() - nodes.keys(), _TASK_SECONDS, software):
            number, machine = found[node]
            if isinstance(answer, BaseException):
                wrong = [" ".join(str(answer).split())[-400:]]
            else:
                wrong = differences(answer[0], self._software, answer[1] - time.time())
            if not 0 <= number < self._count:
                wrong.append(f"expected a number from 0 to {self._count - 1}")
            if wrong:
                raise InputError(
                    f"host {number} of {self._count} ({machine}) cannot join: {'; '.join(wrong)}"
                )
            self._tell(f"host {number} of {self._count} joined: {machine}")
            nodes[node] = found[node]
        if nodes and not self._nodes:
            self._since = time.monotonic()
        self._nodes = nodes
        numbers = {number for number, _ in nodes.values()}
        for number in numbers:
            self._seen[number] = time.monotonic()
        return numbers

    def wait(self, seconds: float, first: float, check: Callable[[], None]) -> None:
        """Return once every host has joined.

        `InputError` after `first` seconds without any host, or `seconds` after the first one;
        `check` raises if waiting is of no use.
        """
        begun, joined = time.monotonic(), 0.0
        while True:
            check()
            if len(there := self.look()) == self._count:
                return
            joined = joined or self._since
            if not joined and time.monotonic() >= begun + first:
                raise InputError(f"join: none of {self._count} hosts within {first:.0f} s")
            if joined and time.monotonic() >= joined + seconds:
                missing = ", ".join(str(n) for n in range(self._count) if n not in there)
                machines = ", ".join(f"{n} is {name}" for n, name in sorted(self._nodes.values()))
                raise InputError(
                    f"join: {len(there)} of {self._count} hosts within {seconds:.0f} s of the "
                    f"first; missing: {missing}; of the others, {machines}"
                )
            time.sleep(_LOOK_SECONDS)

    def problem(self, seconds: float) -> str:
        """Why the run has to be stopped: a host that differs, or is missed; empty if nothing.

        Machines that wait for others for longer than `seconds` are billed; where no host is left,
        nothing is.
        """
        try:
            there = self.look()
        except InputError as error:
            return str(error)
        before = time.monotonic() - seconds
        late = [str(n) for n, seen in enumerate(self._seen) if max(self._since, seen) < before]
        lost = f"lost hosts did not return in {seconds:.0f} s: {', '.join(late)}"
        return lost if there and late else ""

    def end(self, status: int) -> None:
        """Send every host the end of the run; one that misses it loses its Ray soon."""
        with contextlib.suppress(Exception):
            for _ in on_each(self._nodes, _END_SECONDS, leave, status):
                pass
