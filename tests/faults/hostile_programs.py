"""Programs that try to harm the machine they run on, and what became of them.

    python -m tests.faults.hostile_programs

prints a table. Every program is Python and runs in the sandbox under the small limits below.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from textwrap import dedent

from training.evaluate.programs.sandbox import Limits, ProgramResult, run

LIMITS = Limits(seconds=2, memory=200 << 20, processes=8, files=4 << 20, output=16 << 10)


@dataclass(frozen=True)
class Hostile:
    """One program.

    Attributes:
        tries: what it tries.
        source: Python.
        ended: how the sandbox must end it.
        says: a regular expression found in its output.
    """

    tries: str
    source: str
    ended: str
    says: str = ""


PROGRAMS = (
    Hostile("to run for ever", "while True: pass", "time"),
    Hostile(
        "to run for ever, without using the processor, ignoring signals",
        """
        import signal, time
        for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_IGN)
        time.sleep(1000)
        """,
        "time",
    ),
    Hostile("to print for ever", "while True: print('x' * 1000)", "output", "xxx"),
    Hostile(
        "a fork bomb",
        """
        import os
        while True:
            try: os.fork()
            except OSError: pass
        """,
        "time",
    ),
    Hostile(
        "more processes than the limit",
        """
        import os, time
        started = 0
        try:
            while os.fork(): started += 1
            time.sleep(1000)
        except OSError as error:
            print(started, "started,", error.strerror)
        """,
        "exit 0",
        "7 started, Resource temporarily unavailable",
    ),
    Hostile("more memory than the limit", "x = bytearray(1 << 30)", "exit 1", "MemoryError"),
    Hostile(
        "more memory than the limit, in several processes",
        """
        import os, time
        for _ in range(3): os.fork()
        x = b"x" * (100 << 20)
        time.sleep(1000)
        """,
        "memory",
    ),
    Hostile(
        "to fill the disk",
        """
        for number in range(1000):
            open(f"/tmp/{number}", "wb").write(b"x" * (1 << 20))
        """,
        "exit 1",
        "No space left on device",
    ),
    Hostile(
        "a file larger than the limit",
        """
        with open("large", "wb") as file:
            file.truncate(1 << 40)
        """,
        "exit 1",
        "File too large",
    ),
    Hostile(
        "to change the system's programs",
        "open('/usr/bin/hostile', 'w')",
        "exit 1",
        "Read-only file system",
    ),
    Hostile("to write beside its folder", "open('/x', 'w')", "exit 1", "Read-only file system"),
    Hostile("to read accounts", "open('/etc/passwd')", "exit 1", "No such file"),
    Hostile(
        "to read keys and secrets",
        """
        import os
        print(sorted(os.environ), [n for n in ("/proc", "/sys", "/home", "/var", "/run")
            if os.path.exists(n)])
        os.listdir(os.path.expanduser("~root/.ssh"))
        """,
        "exit 1",
        r"\['HOME', 'LANG', 'PATH', 'PWD'[^A-Z]*\] \[\]",
    ),
    Hostile(
        "to reach a server",
        "import socket; socket.create_connection(('1.1.1.1', 53), timeout=1)",
        "exit 1",
        "Network is unreachable",
    ),
    Hostile(
        "to end other processes",
        """
        import os, signal
        try: os.kill(int(open("outside").read()), signal.SIGKILL)
        except ProcessLookupError as error: print(error.strerror, flush=True)
        for target in (1, os.getppid()):  # the second ends the sandbox, with this process
            os.kill(target, signal.SIGKILL)
        """,
        "killed",
        "No such process",
    ),
    Hostile(
        "to become root in a namespace of its own",
        """
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        CLONE_NEWUSER, SIGCHLD, SYS_clone = 0x10000000, 17, {"x86_64": 56, "aarch64": 220}
        print(libc.syscall(SYS_clone[os.uname().machine], CLONE_NEWUSER | SIGCHLD, 0, 0, 0, 0))
        """,
        "exit 0",
        "-1",
    ),
    Hostile(
        "to live on after its end",
        """
        import os, time
        if not os.fork():
            os.setsid()
            if not os.fork(): time.sleep(1000)
        print("left")
        """,
        "exit 0",
        "left",
    ),
)


def attack(hostile: Hostile, outside: int) -> ProgramResult:
    """Run one program, which may read the number of a process outside that it must not reach."""
    python = os.path.realpath(sys.executable)
    files = {"main.py": dedent(hostile.source), "outside": str(outside)}
    return run(files, [[python, "-I", "-S", "main.py"]], LIMITS)


def was_kept_in(hostile: Hostile, outcome: ProgramResult) -> bool:
    """Whether it ended as it must."""
    return outcome.ended == [hostile.ended] and bool(re.search(hostile.says, outcome.output))


def main() -> None:
    """Print the table."""
    for hostile in PROGRAMS:
        outcome = attack(hostile, os.getpid())
        as_expected = was_kept_in(hostile, outcome)
        last = (outcome.output.strip().splitlines() or [""])[-1]
        mark = "kept in" if as_expected else "NOT AS EXPECTED"
        print(f"{hostile.tries:62} | {mark} | {outcome.ended[-1]:7} | {last[:70]}", flush=True)


if __name__ == "__main__":
    main()
