"""Runs untrusted programs on Linux, without root.

A program gets its own process, network and user namespaces, a file system with the machine's
programs and libraries (read-only) and one small writable folder in memory, and limits on time,
memory, processes, files and output. Where libseccomp is installed, a filter refuses system calls
that such programs do not need. `inside.py` sets this up; this module starts and watches it.

The sandbox shares the machine's kernel and does not protect against kernel bugs. Evaluate models
that may have been trained to attack on a separate virtual machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from pipeline.errors import InputError

FOLDER = "/box"
_SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64"),
    *("/etc/alternatives", "/etc/ld.so.cache"),
)
_INSIDE = Path(__file__).with_name("inside.py")
_POLL = 0.1  # seconds
_MARGIN = 30.0  # seconds allowed for start and end, on a busy machine


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a program's resources.

    Attributes:
        seconds: wall time of each command, and CPU time of each process.
        memory: bytes of address space of each process, and of resident memory of all together.
        processes: number of processes and threads at once.
        files: bytes in the writable folder, which is in memory too.
        output: bytes of standard output and error together.
    """

    seconds: float = 10.0
    memory: int = 1 << 30
    processes: int = 32
    files: int = 64 << 20
    output: int = 64 << 10

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not value > 0:
                raise InputError(f"Limits.{name}: expected more than 0, found {value!r}")


@dataclass
class Outcome:
    """The result of a program's commands.

    Attributes:
        ended: how each command ended: "exit N", the name of a signal or "time"; the last one is
            "time", "memory", "output" or "killed" (by the kernel, out of memory) when the whole
            sandbox was ended.
        output: what the commands printed, up to the limit.
        layers: the isolation layers in use, see `check`.
    """

    ended: list[str] = field(default_factory=list)
    output: str = ""
    layers: tuple[str, ...] = ()


def run(files: Mapping[str, str], commands: Sequence[Sequence[str]], limits: Limits) -> Outcome:
    """Run commands in sequence until one does not exit with 0.

    Args:
        files: text of each file in the commands' working directory, by name.
        commands: absolute path and arguments of each program.
        limits: limits of each command.

    Raises:
        InputError: this machine cannot run a program safely. No command was run.
    """
    if not sys.platform.startswith("linux"):
        raise InputError(
            f"sandbox: expected Linux, whose namespaces it uses, found {sys.platform}; "
            "evaluate code on a Linux machine"
        )
    with tempfile.TemporaryDirectory(prefix="sandbox-") as root:
        job = {
            "root": root,
            "folder": FOLDER,
            "visible": visible(),
            "files": files,
            "commands": [{"program": list(c), "seconds": limits.seconds} for c in commands],
            "limits": asdict(limits),
        }
        reading, writing = os.pipe()
        with subprocess.Popen(
            [os.path.realpath(sys.executable), "-I", "-S", str(_INSIDE), str(writing)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(writing,),
            env={},
        ) as process:
            os.close(writing)
            try:
                return _watch(process, reading, job, limits)
            finally:
                process.kill()  # its child, process 1 of the namespace, dies too (PR_SET_PDEATHSIG)
                os.close(reading)


def check(limits: Limits) -> tuple[str, ...]:
    """The isolation layers on this machine: "namespaces", "system call filter".

    Raises:
        InputError: this machine cannot run a program safely, or `limits` are too small for one.
    """
    shell = ["/bin/sh", "-c", "/bin/true & wait $! && echo ready"]
    found = run({}, [shell], limits)
    if found.output != "ready\n" or found.ended != ["exit 0"]:
        raise InputError(
            f"sandbox: expected a shell to start a program under {limits}, found "
            f"{found.ended} {found.output[:200]!r}; raise the limits (before Linux 5.14 the limit "
            "on processes counts all of this user's)"
        )
    return found.layers


def visible() -> list[str]:
    """Paths of the machine that programs can read: its programs, its libraries, this Python."""
    python = os.path.realpath(sys.base_prefix)
    found = [path for path in _SYSTEM if os.path.lexists(path)]
    return found if python.startswith("/usr") else [*found, python]


def _watch(
    process: subprocess.Popen[bytes], reading: int, job: dict[str, Any], limits: Limits
) -> Outcome:
    """Send the job and read output and report, until the end or a limit of the whole sandbox."""
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError):  # it did not start; its output has the reason
        process.stdin.write(json.dumps(job).encode())
        process.stdin.close()
    deadline = time.monotonic() + limits.seconds * len(job["commands"]) + _MARGIN
    output, report = bytearray(), bytearray()
    stopped = None
    with selectors.DefaultSelector() as waiting:
        waiting.register(process.stdout.fileno(), selectors.EVENT_READ, output)
        waiting.register(reading, selectors.EVENT_READ, report)
        while waiting.get_map() and stopped is None:
            for ready, _ in waiting.select(_POLL):
                data = os.read(ready.fd, 1 << 16)
                ready.data.extend(data)
                if not data:
                    waiting.unregister(ready.fd)
            if len(output) > limits.output:
                stopped = "output"
            elif time.monotonic() > deadline:
                stopped = "time"
            elif _resident(process.pid) > limits.memory:
                stopped = "memory"
    found = _outcome(bytes(output[: limits.output]), bytes(report))
    missing = set(found.ended) <= {"exit 0"} and len(found.ended) < len(job["commands"])
    if stopped or missing:
        found.ended.append(stopped or "killed")
    return found


def _resident(pid: int) -> int:
    """Resident bytes of the program's processes: descendants of `pid` except the first.

    The first descendant is process 1 of the namespace, which is part of the sandbox.
    """
    total = 0
    try:
        started = psutil.Process(pid).children(recursive=True)[1:]
    except psutil.Error:
        return 0
    for each in started:
        try:
            total += each.memory_info().rss
        except psutil.Error:
            continue  # it has ended
    return total


def _outcome(output: bytes, report: bytes) -> Outcome:
    found = Outcome(output=output.decode("utf-8", "replace"))
    for line in report.splitlines():
        message = json.loads(line)
        if "refused" in message:
            raise InputError(
                f"sandbox: this kernel does not let a user without root create one "
                f"({message['refused']}); allow user namespaces (sysctl "
                "kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns="
                "0, or a container run with --security-opt seccomp=unconfined), on Linux 5.12 or "
                "newer"
            )
        if "layers" in message:
            found.layers = tuple(message["layers"])
        else:
            found.ended.append(message["ended"])
    if not found.layers:
        raise InputError(f"sandbox: its process did not start: {found.output[-300:]!r}")
    return found
