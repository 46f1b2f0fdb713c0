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
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import psutil

from pipeline import holders
from pipeline.errors import InputError, WorkerLost
from pipeline.graph.hardware import Hardware
from pipeline.launch.host import Host
from pipeline.launch.job import LOST
from pipeline.launch.nodes import Hosts, RayNode, connected
from pipeline.store import storage

SECRET = "RAY_AUTH_TOKEN"  # the variable from which Ray reads the secret
_POLL_SECONDS = 1.0
_RAY_SECONDS = 120.0
_LOST_SECONDS = 60.0


def shared_secret(url: str) -> str:
    """The secret in an object of a store; the first host that calls this writes it."""
    url = storage.normalise(url)
    storage.create(url, secrets.token_hex(32).encode())
    return storage.read_bytes(url).decode()


def is_here(address: str, wait: float) -> bool:
    """Whether a host name or address is this machine's.

    A pod of Kubernetes has no name before its record is published. Raises `InputError` for a name
    that is unknown after `wait` seconds.
    """
    deadline = time.monotonic() + wait
    while True:
        try:
            found = {str(info[4][0]) for info in socket.getaddrinfo(address, None)}
            break
        except OSError as error:
            if time.monotonic() >= deadline:
                raise InputError(f"join: cannot resolve the host {address!r} ({error})") from error
            time.sleep(_POLL_SECONDS)
    return bool(found & {a.address for each in psutil.net_if_addrs().values() for a in each})


def follow(
    head: tuple[str, int], host: Host, *, wait: float, imitate: bool, tell: Callable[[str], None]
) -> int:
    """Join the head's Ray, stay until the run has ended, and return its exit status, or `LOST`."""
    _reach(head, wait)
    try:
        with _terminable(), RayNode(head, host, first=False, imitate=imitate) as node:
            tell(f"{host}: Ray starts; the head is {head[0]}:{head[1]}")
            heard = time.monotonic()
            while (status := node.ended()) is None:
                node.check()
                if not (error := _unreachable(head)):
                    heard = time.monotonic()
                elif time.monotonic() - heard > _LOST_SECONDS:  # Ray itself may take minutes
                    raise WorkerLost(
                        f"join: the head did not answer for {_LOST_SECONDS} s ({error})"
                    )
                time.sleep(_POLL_SECONDS)
            return status
    except WorkerLost as error:
        tell(f"error: {error}")
        return LOST


def lead(
    head: tuple[str, int],
    host: Host | None,
    count: int,
    *,
    run: Sequence[str],
    wait: float,
    queue: float,
    imitate: bool,
    tell: Callable[[str], None],
) -> int:
    """Start the head's Ray, run a command once all hosts have joined; return its exit status.

    `host` is None for a head outside the slice. An empty command waits for a signal. `queue` are
    the seconds to wait for the first host, `wait` those for hosts while others are there.
    """
    # Ray's head needs the address at which other hosts reach it.
    head, status = (socket.gethostbyname(head[0]), head[1]), 1
    if held := holders.port(head[1]):
        raise InputError(f"join: {held.found}; {held.advice} (HEAD:PORT, the same on all hosts)")
    with _terminable(), RayNode(head, host, first=True, imitate=imitate) as node:
        _reach(head, _RAY_SECONDS, node.check)
        with connected(head):
            hosts = Hosts(count, tell)
            try:
                hosts.wait(wait, queue, node.check)
                tell(f"all {count} hosts joined")
                os.environ["RAY_ADDRESS"] = f"{head[0]}:{head[1]}"
                status = _run(run, hosts, wait, tell)
            finally:
                hosts.end(status)
    return status


def _reach(head: tuple[str, int], seconds: float, check: Callable[[], None] = lambda: None) -> None:
    """Return once the head's Ray accepts connections: hosts that connect earlier give up."""
    deadline = time.monotonic() + seconds
    while (error := _unreachable(head)) is not None:
        check()
        if time.monotonic() > deadline:
            raise InputError(
                f"join: no head answers at {head[0]}:{head[1]} within {seconds:.0f} s "
                f"({error}); is it up, and can hosts reach its ports? Those that Google opens for "
                "TPUs (8470, 8471, 8474, 8476) are not enough: Ray and JAX's coordinator take "
                "others, so allow tcp between the hosts"
            )
        time.sleep(_POLL_SECONDS)


def _unreachable(head: tuple[str, int]) -> OSError | None:
    try:
        socket.create_connection(head, timeout=_POLL_SECONDS).close()
    except OSError as error:
        return error
    return None


def _run(run: Sequence[str], hosts: Hosts, wait: float, tell: Callable[[str], None]) -> int:
    """Run the command; return its exit status.

    It is stopped, and saves, when hosts have waited for others for as long as they may, or when one
    returns with other software.
    """
    if not run:
        tell(f"RAY_ADDRESS={os.environ['RAY_ADDRESS']}; Ctrl-C ends it")
        signal.pause()
    try:
        process = subprocess.Popen(run)
    except OSError as error:
        raise InputError(f"join: {run[0]} does not start ({error})") from error
    stopped = False
    while True:
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(_POLL_SECONDS)
                return status if status >= 0 else 128 - status
            if not stopped and (cause := hosts.problem(wait)):
                tell(f"error: {cause}")
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


_WAIT = "300s"  # the Rays of the head and all hosts start on one machine
_END_SECONDS = 30.0
_MOST_HOSTS = 16


def run_local(hardware: Hardware, name: str, command: Sequence[str]) -> int:
    """Start the hosts, run the command, end the hosts, and return the command's exit status."""
    if hardware.processes > _MOST_HOSTS:
        raise InputError(
            f"--on local: {hardware.name} has {hardware.processes} hosts, expected at most "
            f"{_MOST_HOSTS}; imitate a smaller slice with --hardware"
        )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    join = [sys.executable, "-m", "pipeline.cli", "join", f"127.0.0.1:{port}"]
    join += ["--hardware", hardware.name, "--name", name, "--wait", _WAIT, "--imitate"]
    environment = {**os.environ, SECRET: secrets.token_hex(32)}

    def start(index: int) -> subprocess.Popen[bytes]:
        # In its own session: Ctrl-C must reach only the run, which needs its hosts to save.
        number, worker = divmod(index, hardware.hosts_per_slice)
        place = ["--role", "host", "--worker-id", str(worker), "--slice-id", str(number)]
        return subprocess.Popen([*join, *place], env=environment, start_new_session=True)

    hosts = [start(index) for index in range(hardware.processes)]
    try:
        head = subprocess.Popen([*join, "--role", "head", "--", *command], env=environment)
        while head.poll() is None:
            # The head got SIGINT too: wait for its run.
            with contextlib.suppress(KeyboardInterrupt):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    head.wait(_POLL_SECONDS)
                for index, host in enumerate(hosts):
                    lost = (host.poll() or 0) < 0 or host.returncode == LOST
                    if lost and head.returncode is None:
                        hosts[index] = start(index)
        for host in hosts:
            with contextlib.suppress(subprocess.TimeoutExpired):
                host.wait(_END_SECONDS)
        return head.returncode
    finally:
        for host in hosts:
            host.terminate()
        for host in hosts:
            try:
                host.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(host.pid, signal.SIGKILL)
