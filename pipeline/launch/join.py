"""Join this host to a cluster: compare it with the head, start Ray, wait for the run's end."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import psutil

from pipeline.errors import InputError, WorkerLost
from pipeline.launch import host as hosts
from pipeline.launch import metadata
from pipeline.launch.host import Host
from pipeline.launch.meeting import Head, Meeting
from pipeline.launch.ray_node import RayNode, command, imitation
from pipeline.store import storage
from pipeline.store.bucket import bucket_warnings

LOST = 75  # exit status of a host that lost its Ray or the head; its supervisor restarts it
SECRET = "RAY_AUTH_TOKEN"  # the variable from which Ray reads the secret
_POLL_SECONDS = 0.5
_LOOK_SECONDS = 10.0
_CONNECT_SECONDS = 1.0
_RAY_SECONDS = 120.0


@dataclass(frozen=True, kw_only=True)
class Joining:
    """The arguments of `join`.

    Attributes:
        head: address and port of the head's Ray; the port after it is the meeting's.
        role: "head" (outside the slice), "host", or "auto": both where `head` is this machine.
        hosts: number of hosts.
        host: this host; None for a head outside the slice.
        wait: seconds to wait for the head, or as the head for hosts while others are there.
        queue: seconds to wait as the head for the first host.
        imitate: imitate the chips on CPUs.
        secret: the cluster's secret, also Ray's token; empty for none.
        run: the command that the head runs once all have joined; empty to wait for a signal.
        tell: prints a line for the user.
    """

    head: tuple[str, int]
    role: str
    hosts: int
    host: Host | None
    wait: float
    queue: float
    imitate: bool
    secret: str
    run: tuple[str, ...]
    tell: Callable[[str], None]

    @property
    def prefix(self) -> str:
        """The store that the command names; empty for none."""
        return next(
            (b for a, b in zip(self.run, self.run[1:], strict=False) if a == "--prefix"), ""
        )

    @property
    def meeting(self) -> tuple[str, int]:
        """Address and port of the head's `Meeting`."""
        return self.head[0], self.head[1] + 1

    @property
    def process(self) -> str:
        """Host name and process id, which identify the process of this host."""
        return f"{socket.gethostname()} ({os.getpid()})"

    @property
    def access(self) -> dict[str, str]:
        """The environment of every process that connects to this cluster's Ray.

        It always sets the mode: by default a file in the user's home decides whether a new cluster
        requires a token, and hosts could differ.
        """
        if self.secret:
            return {"RAY_AUTH_MODE": "token", SECRET: self.secret}
        return {"RAY_AUTH_MODE": os.environ.get("RAY_AUTH_MODE", "disabled")}

    def node(self, *, first: bool) -> RayNode:
        """Start Ray on this host."""
        environment = self.access | ({} if self.host is None else self.host.variables)
        if self.imitate and self.host is not None:
            environment |= imitation(self.host.hardware)
        words = command(self.head, self.host, first=first, imitate=self.imitate)
        return RayNode(words, environment, apart=self.imitate)


def shared_secret(url: str) -> str:
    """The secret in an object of a store; the first host that calls this writes it."""
    url = storage.normalise(url)
    storage.create(url, secrets.token_hex(32).encode())
    return storage.read_bytes(url).decode()


def is_here(address: str) -> bool:
    """Whether a host name or address is this machine's. Raises `InputError` for an unknown name."""
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(address, None)}
    except OSError as error:
        raise InputError(f"join: cannot resolve the host {address!r} ({error})") from error
    own = {a.address for each in psutil.net_if_addrs().values() for a in each}
    return bool(found & own)


def join(joining: Joining) -> int:
    """Join, stay until the run has ended, and return its exit status, or `LOST`."""
    if joining.host is not None and not joining.imitate:
        hosts.check_chips(joining.host)
    leads = joining.role == "head" or (joining.role == "auto" and is_here(joining.head[0]))
    if not leads:
        try:
            return _follow(joining)
        except WorkerLost as error:
            joining.tell(f"error: {error}")
            return LOST
    # Ray's head needs the address at which other hosts reach it.
    address = socket.gethostbyname(joining.head[0])
    return _lead(replace(joining, head=(address, joining.head[1])))


def _follow(joining: Joining) -> int:
    host, head = joining.host, Head(joining.meeting, joining.secret)
    assert host is not None
    facts, ahead = head.facts(joining.wait)
    if found := hosts.differences(hosts.software(), facts, ahead):
        cause = f"{host} ({joining.process}) cannot join: {'; '.join(found)}"
        head.report(host.index, joining.process, cause)
        raise InputError(cause)
    if cause := head.report(host.index, joining.process)["cause"]:
        # The other may be a machine that is lost, whose number is free soon.
        raise WorkerLost(f"{host} ({joining.process}) cannot join yet: {cause}")
    with _terminable(), joining.node(first=False) as node:
        joining.tell(f"{host}: joined {joining.head[0]}:{joining.head[1]}")
        return head.until_ended(host.index, joining.process, node.check)


def _lead(joining: Joining) -> int:
    if not joining.secret:
        joining.tell("warning: anyone who reaches this cluster's ports can run code; give --shared")
    for warning in bucket_warnings(joining.prefix, metadata.region()):
        joining.tell(f"warning: {warning}")
    software = hosts.software()
    meeting = Meeting(joining.meeting, software, joining.hosts, joining.tell, joining.secret)
    status = 1
    with _terminable(), joining.node(first=True) as node:
        try:
            _wait_for_ray(joining.head, node)
            if joining.host is not None:
                meeting.hear(joining.host.index, joining.process, "")
            meeting.wait(joining.wait, joining.queue)
            joining.tell(f"all {joining.hosts} hosts joined")
            status = _run(joining, meeting)
        finally:
            meeting.end(status)
    return status


def _wait_for_ray(address: tuple[str, int], node: RayNode) -> None:
    """Return once the head's Ray accepts connections: hosts that connect earlier give up."""
    deadline = time.monotonic() + _RAY_SECONDS
    while True:
        node.check()
        try:
            socket.create_connection(address, timeout=_CONNECT_SECONDS).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise InputError(f"join: Ray did not start within {_RAY_SECONDS:.0f} s") from error
            time.sleep(_POLL_SECONDS)


def _run(joining: Joining, meeting: Meeting) -> int:
    """Run the command with Ray's address in its environment; return its exit status.

    It is stopped, and saves, when hosts have waited for others for as long as they may.
    """
    address = f"{joining.head[0]}:{joining.head[1]}"
    environment = {**os.environ, **joining.access, "RAY_ADDRESS": address}
    if not joining.run:
        joining.tell(f"RAY_ADDRESS={address}; Ctrl-C ends it")
        signal.pause()
    try:
        process = subprocess.Popen(joining.run, env=environment)
    except OSError as error:
        raise InputError(f"join: {joining.run[0]} does not start ({error})") from error
    late = ""
    while True:
        try:
            status = process.wait(_LOOK_SECONDS)
            return status if status >= 0 else 128 - status
        except subprocess.TimeoutExpired:
            if not late and (late := meeting.stranded(joining.wait)):
                joining.tell(f"error: lost hosts did not return in {joining.wait:.0f} s: {late}")
                process.terminate()
        except _Terminated:
            # The run saves a checkpoint and ends; keep waiting for it.
            process.terminate()
        except KeyboardInterrupt:
            continue  # the terminal sent SIGINT to the run too


class _Terminated(Exception):
    """SIGTERM was received."""


@contextmanager
def _terminable() -> Iterator[None]:
    """Raise on SIGTERM, so that the processes started in the block are ended."""

    def end(*_: Any) -> None:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except _Terminated:
        raise KeyboardInterrupt from None
    finally:
        signal.signal(signal.SIGTERM, before)
