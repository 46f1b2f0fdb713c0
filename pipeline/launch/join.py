"""A host joins a cluster: its facts, the head's answer, Ray, and the wait for the run's end."""

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
from pipeline.launch.region import region_warning
from pipeline.store import storage

LOST = 75  # exit status of a host that lost its Ray or the head: whoever supervises it tries again
SECRET = "RAY_AUTH_TOKEN"  # the variable from which Ray takes it
_POLL_SECONDS = 0.5
_CONNECT_SECONDS = 1.0
_RAY_SECONDS = 120.0


@dataclass(frozen=True, kw_only=True)
class Joining:
    """What `join` was asked.

    Attributes:
        head: address and port of the head's Ray; the port after it is the meeting's.
        role: "head" (beside the slice), "host", or "auto": both where `head` is this machine.
        hosts: how many there are.
        host: which of them this is; None for a head beside the slice.
        wait: seconds to wait for the head, or as the head for the hosts.
        imitate: claim the chips without having them.
        secret: of the cluster, for Ray too; empty for none.
        run: the command that the head runs once all have joined; empty to wait for a signal.
        tell: takes a line for the user.
    """

    head: tuple[str, int]
    role: str
    hosts: int
    host: Host | None
    wait: float
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
        """Where the hosts meet."""
        return self.head[0], self.head[1] + 1

    @property
    def process(self) -> str:
        """What tells this host from others."""
        return f"{socket.gethostname()} ({os.getpid()})"

    @property
    def access(self) -> dict[str, str]:
        """The environment of whatever talks to this cluster's Ray.

        Ray decides by a file in the user's home whether a new cluster asks for a token; hosts
        would then differ.
        """
        if self.secret:
            return {"RAY_AUTH_MODE": "token", SECRET: self.secret}
        return {"RAY_AUTH_MODE": os.environ.get("RAY_AUTH_MODE", "disabled")}

    def node(self, *, first: bool) -> RayNode:
        """Ray on this host."""
        environment = self.access | ({} if self.host is None else self.host.variables)
        if self.imitate and self.host is not None:
            environment |= imitation(self.host.hardware)
        words = command(self.head, self.host, first=first, imitate=self.imitate)
        return RayNode(words, environment, apart=self.imitate)


def shared_secret(url: str) -> str:
    """The secret in an object of a store, which the first host to ask writes."""
    url = storage.normalise(url)
    storage.create(url, secrets.token_hex(32).encode())
    return storage.read_bytes(url).decode()


def is_here(address: str) -> bool:
    """Whether a host name or address is this machine's. Raises `InputError` for an unknown name."""
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(address, None)}
    except OSError as error:
        raise InputError(f"join: no host is called {address!r} ({error})") from error
    own = {a.address for each in psutil.net_if_addrs().values() for a in each}
    return bool(found & own)


def join(joining: Joining) -> int:
    """Join, and stay until the run has ended; its exit status, or `LOST`."""
    if joining.host is not None and not joining.imitate:
        hosts.check_chips(joining.host)
    leads = joining.role == "head" or (joining.role == "auto" and is_here(joining.head[0]))
    if not leads:
        try:
            return _follow(joining)
        except WorkerLost as error:
            joining.tell(f"error: {error}")
            return LOST
    # Ray's head wants the address that others reach it by.
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
        raise InputError(f"{host} ({joining.process}) cannot join: {cause}")
    with _terminable(), joining.node(first=False) as node:
        joining.tell(f"{host}: joined {joining.head[0]}:{joining.head[1]}")
        return head.until_ended(host.index, joining.process, node.check)


def _lead(joining: Joining) -> int:
    if not joining.secret:
        joining.tell("warning: who reaches this cluster's ports can run code on it; give --shared")
    if warning := region_warning(joining.prefix, metadata.region()):
        joining.tell(f"warning: {warning}")
    software = hosts.software()
    meeting = Meeting(joining.meeting, software, joining.hosts, joining.tell, joining.secret)
    status = 1
    with _terminable(), joining.node(first=True) as node:
        try:
            _wait_for_ray(joining.head, node)
            if joining.host is not None:
                meeting.hear(joining.host.index, joining.process, "")
            meeting.wait(joining.wait)
            joining.tell(f"all {joining.hosts} hosts joined")
            status = _run(joining)
        finally:
            meeting.end(status)
    return status


def _wait_for_ray(address: tuple[str, int], node: RayNode) -> None:
    """Return when the head's Ray accepts connections; hosts that ask before give up."""
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


def _run(joining: Joining) -> int:
    """Run the command with Ray's address in its environment; its exit status."""
    address = f"{joining.head[0]}:{joining.head[1]}"
    environment = {**os.environ, **joining.access, "RAY_ADDRESS": address}
    if not joining.run:
        joining.tell(f"RAY_ADDRESS={address}; Ctrl-C ends it")
        signal.pause()
    try:
        process = subprocess.Popen(joining.run, env=environment)
    except OSError as error:
        raise InputError(f"join: {joining.run[0]} does not start ({error})") from error
    while True:
        try:
            status = process.wait()
            return status if status >= 0 else 128 - status
        except _Terminated:
            # The run saves and ends; that is what is waited for.
            process.terminate()
        except KeyboardInterrupt:
            continue  # the run got it from the terminal too


class _Terminated(Exception):
    """SIGTERM came."""


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM raises, so that what was started is ended."""

    def end(*_: Any) -> None:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except _Terminated:
        raise KeyboardInterrupt from None
    finally:
        signal.signal(signal.SIGTERM, before)
