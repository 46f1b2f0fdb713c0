"""What another process holds that a run needs: chips, libtpu's lock file, ports; and who it is.

Errors that libtpu and JAX have for these name neither: "Couldn't open iommu group /dev/vfio/0:
Device or resource busy", "TPU is already in use", or a wait for a coordinator that never answers.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import os
from collections.abc import Iterable
from dataclasses import dataclass

import psutil

CHIPS = ("accel[0-9]*", "vfio/[0-9]*")  # under /dev, of TPUs
LOCK = "/tmp/libtpu_lockfile"
PORTS = {
    6380: "Ray, on the head of `ponente join`",
    8471: "libtpu, between the hosts of a slice",
    8476: "JAX's coordinator, by default until 0.8.0",
    8482: "JAX's coordinator, by default since 0.8.1",
}


@dataclass(frozen=True)
class Held:
    """One thing that is held: a sentence with its name and holder, and what to do."""

    found: str
    advice: str


def chips(devices: str = "/dev", lock: str = LOCK) -> list[Held]:
    """The TPU chips that are in use, and a lock file of libtpu's that was left."""
    paths = [path for each in CHIPS for path in sorted(glob.glob(f"{devices}/{each}"))]
    owners = _open_by([*paths, lock])
    found: dict[str, list[str]] = {}
    for path in paths:
        if path in owners or _busy(path):
            found.setdefault(owners.get(path, ""), []).append(path)
    held = [
        Held(
            f"{', '.join(names)}: held by {who or 'a process that this user cannot see'}",
            f"end it{'' if who else f' (sudo lsof -w {names[0]} names it)'}, or let its run end; "
            "recreate a host whose chips stay busy",
        )
        for who, names in found.items()
    ]
    if os.path.exists(lock) and not held and lock not in owners:
        held.append(Held(f"{lock}: left by a process that was killed", f"sudo rm {lock}"))
    return held


def unlock(lock: str = LOCK) -> None:
    """Remove libtpu's lock file where no process has it open: one that was killed left it."""
    if os.path.exists(lock) and lock not in _open_by([lock]):
        with contextlib.suppress(OSError):
            os.unlink(lock)


def port(number: int) -> Held | None:
    """Who listens on a port of this machine, if anyone does."""
    try:
        connections = psutil.net_connections("tcp")
    except psutil.Error:  # not permitted
        return None
    listen = [
        each
        for each in connections
        if each.status == psutil.CONN_LISTEN and getattr(each.laddr, "port", 0) == number
    ]
    if not listen:
        return None
    pids = sorted({each.pid for each in listen if each.pid})
    who = ", ".join(map(_name, pids)) or "a process that this user cannot see"
    what = f" ({PORTS[number]})" if number in PORTS else ""
    advice = f"end it{'' if pids else f' (sudo lsof -i :{number} names it)'}, or take another port"
    return Held(f"port {number}{what}: in use by {who}", advice)


def _busy(path: str) -> bool:
    """Whether a group of VFIO refuses to be opened: it lets in one process at a time."""
    if "/vfio/" not in path:
        return False
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return error.errno == errno.EBUSY
    return False


def _open_by(paths: Iterable[str]) -> dict[str, str]:
    """Of files that other processes have open, who has; only what this user may see."""
    wanted = {os.path.realpath(path): path for path in paths}
    found: dict[str, list[str]] = {}
    for pid in psutil.pids():
        names = set()
        with contextlib.suppress(OSError):
            for entry in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    names.add(os.readlink(entry.path))
        for name in names & wanted.keys() if pid != os.getpid() else ():
            found.setdefault(wanted[name], []).append(_name(pid))
    return {path: ", ".join(names) for path, names in found.items()}


def _name(pid: int) -> str:
    try:
        process = psutil.Process(pid)
        return f"{process.name()} (pid {pid}, of {process.username()})"
    except psutil.Error:
        return f"pid {pid}"
