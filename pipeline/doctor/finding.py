"""What a check of `ponente doctor` is and says, and how it is kept from hanging or telling secrets.

A check is a function of the store's prefix that returns one `Finding`. It runs in a thread with a
deadline; what could block for good inside a library (importing jax on a machine whose TPU is held)
runs in a process of its own, which is killed.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail"]
_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|(^|_)KEY(_|$)", re.IGNORECASE)
_PARAMETER = re.compile(
    r"\b([\w-]*(?:token|secret|password|signature|credential|api_?key|sig)[\w-]*=)[^&\s'\"]+",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Finding:
    """What one check found.

    Attributes:
        name: the check's name.
        status: "ok", "warn" (works, but) or "fail" (a run would go wrong).
        found: one line: what is there.
        advice: what to do about it; empty when there is nothing to do.
    """

    name: str
    status: Status
    found: str
    advice: str = ""


@dataclass(frozen=True)
class Check:
    """A check by name.

    Attributes:
        look: prefix -> what was found.
        seconds: deadline.
        after: name of an earlier check; when that fails, this one is not made.
    """

    name: str
    look: Callable[[str], Finding]
    seconds: float = 30.0
    after: str = ""


def clean(text: str) -> str:
    """`text` on one line, without the user part of URLs, secret parameters and values of variables.

    A variable's value is secret when its name says so (TOKEN, SECRET, PASSWORD, KEY ...) and it is
    neither a path nor very short.
    """
    for name, value in os.environ.items():
        if _SECRET_NAME.search(name) and len(value) >= 8 and not os.path.exists(value):
            text = text.replace(value, "***")
    text = re.sub(r"://[^/@\s]*@", "://***@", text)
    text = re.sub(r"(?i)\b(bearer|basic)\s+[\w.~+/=-]{8,}", r"\1 ***", text)
    text = _PARAMETER.sub(r"\1***", text)
    return " ".join(text.split())


def describe(error: BaseException) -> str:
    """An exception as one line: its type and its message."""
    message = str(error)
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def guarded(
    check: Check, prefix: str, first: Callable[[], Finding] | None = None
) -> Callable[[], Finding]:
    """Start the check in a thread, after `first` if given; the function returned waits for it.

    An exception is a failure, and so is no answer within `check.seconds` of the start.
    """
    deadline = time.monotonic() + check.seconds
    box: list[Finding] = []

    def work() -> None:
        try:
            if first is not None and first().status == "fail":
                found = f"not looked at, because of {check.after}"
                box.append(Finding(check.name, "warn", found))
            else:
                box.append(check.look(prefix))
        except BaseException as error:  # noqa: BLE001 - whatever a library raises is what was found
            box.append(Finding(check.name, "fail", describe(error)))

    # A daemon: a check that never returns must not keep the process from ending.
    thread = threading.Thread(target=work, daemon=True, name=f"doctor {check.name}")
    thread.start()
    return lambda: _wait(check, thread, deadline, box)


def _wait(check: Check, thread: threading.Thread, deadline: float, box: list[Finding]) -> Finding:
    thread.join(max(0.0, deadline - time.monotonic()))
    if not box:
        return Finding(
            check.name,
            "fail",
            f"no answer in {check.seconds:g} s",
            "it hangs: look at the network, the mount or the device it asks",
        )
    found = box[0]
    return Finding(found.name, found.status, clean(found.found), clean(found.advice))


def ask(command: list[str], seconds: float) -> tuple[int | None, str, str]:
    """Run a command in this environment: (exit status, stdout, stderr); status None: killed late.

    The process and all its children are killed after `seconds`, or when this one ends.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    _asked.add(process)
    try:
        out, err = process.communicate(timeout=seconds)
        return process.returncode, out, err
    except subprocess.TimeoutExpired:
        _kill(process)
        out, err = process.communicate()
        return None, out, err
    finally:
        _asked.discard(process)


_asked: set[subprocess.Popen[str]] = set()


def _kill(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


@atexit.register
def _kill_asked() -> None:
    # In sessions of their own they would outlive an interrupted doctor, and keep the TPU.
    for process in tuple(_asked):
        _kill(process)
