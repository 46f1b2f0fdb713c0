"""Join this host to a cluster: Ray on this machine, until the run has ended.

    ray start --head                                    ray start --address=HEAD
    one Ray task a host: has it the head's software?
    the run, once all hosts have joined
    one Ray task a host: the run's exit status      ->  ends with it

A host whose Ray ends earlier, as when the head is lost, returns `LOST`: join again.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import psutil

from pipeline.errors import InputError, WorkerLost
from pipeline.launch import google, nodes
from pipeline.launch.host import Host, check_chips
from pipeline.launch.nodes import Hosts
from pipeline.launch.ray_node import RayNode
from pipeline.store import storage
from pipeline.store.bucket import bucket_warnings

LOST = 75  # exit status of a host that lost its Ray or the head; its supervisor restarts it
SECRET = "RAY_AUTH_TOKEN"  # the variable from which Ray reads the secret
_POLL_SECONDS = 1.0
_RAY_SECONDS = 120.0


@dataclass(frozen=True, kw_only=True)
class Joining:
    """The arguments of `join`.

    Attributes:
        head: address and port of the head's Ray.
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
        return RayNode(self.head, self.host, self.access, first=first, imitate=self.imitate)


def shared_secret(url: str) -> str:
    """The secret in an object of a store; the first host that calls this writes it."""
    url = storage.normalise(url)
    storage.create(url, secrets.token_hex(32).encode())
    return storage.read_bytes(url).decode()


def join(joining: Joining) -> int:
    """Join, stay until the run has ended, and return its exit status, or `LOST`."""
    if joining.host is not None and not joining.imitate:
        check_chips(joining.host)
    if joining.role == "head" or (joining.role == "auto" and is_here(joining.head[0])):
        # Ray's head needs the address at which other hosts reach it.
        address = socket.gethostbyname(joining.head[0])
        return _lead(replace(joining, head=(address, joining.head[1])))
    reach(joining.head, joining.wait)
    try:
        with _terminable(), joining.node(first=False) as node:
            joining.tell(f"{joining.host}: Ray starts; head {joining.head[0]}:{joining.head[1]}")
            while (status := node.ended()) is None:
                node.check()
                time.sleep(_POLL_SECONDS)
            return status
    except WorkerLost as error:
        joining.tell(f"error: {error}")
        return LOST


def is_here(address: str) -> bool:
    """Whether a host name or address is this machine's. Raises `InputError` for an unknown name."""
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(address, None)}
    except OSError as error:
        raise InputError(f"join: cannot resolve the host {address!r} ({error})") from error
    own = {a.address for each in psutil.net_if_addrs().values() for a in each}
    return bool(found & own)


def reach(head: tuple[str, int], seconds: float, check: Callable[[], None] = lambda: None) -> None:
    """Return once the head's Ray accepts connections: hosts that connect earlier give up.

    Raises:
        InputError: when it does not within `seconds`.
    """
    deadline = time.monotonic() + seconds
    while True:
        check()
        try:
            socket.create_connection(head, timeout=_POLL_SECONDS).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise InputError(
                    f"join: no head answers at {head[0]}:{head[1]} within {seconds:.0f} s "
                    f"({error}); is it up, and can hosts reach its ports?"
                ) from error
            time.sleep(_POLL_SECONDS)


def _lead(joining: Joining) -> int:
    if not joining.secret:
        joining.tell("warning: anyone who reaches this cluster's ports can run code; give --shared")
    store = next((b for a, b in pairwise(joining.run) if a == "--prefix"), "")
    for warning in bucket_warnings(store, google.region()):
        joining.tell(f"warning: {warning}")
    status = 1
    with _terminable(), joining.node(first=True) as node:
        reach(joining.head, _RAY_SECONDS, node.check)
        with nodes.connected(joining.head, joining.access):
            hosts = Hosts(joining.hosts, joining.tell)
            try:
                hosts.wait(joining.wait, joining.queue, node.check)
                joining.tell(f"all {joining.hosts} hosts joined")
                status = _run(joining, hosts)
            finally:
                hosts.end(status)
    return status


def _run(joining: Joining, hosts: Hosts) -> int:
    """Run the command with Ray's address in its environment; return its exit status.

    It is stopped, and saves, when hosts have waited for others for as long as they may, or when one
    returns with other software.
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
    stopped = False
    while True:
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(_POLL_SECONDS)
                return status if status >= 0 else 128 - status
            if not stopped and (cause := hosts.problem(joining.wait)):
                joining.tell(f"error: {cause}")
                process.terminate()
                stopped = True
        except _Terminated:
            process.terminate()  # the run saves a checkpoint and ends; keep waiting for it
        except KeyboardInterrupt:
            continue  # the terminal sent SIGINT to the run too


class _Terminated(Exception):
    """SIGTERM was received."""


@contextlib.contextmanager
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
