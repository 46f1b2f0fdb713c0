"""Rendezvous of a cluster's hosts: an HTTP server on the head, started before Ray.

A host compares its software with the head's before it starts Ray, reports its worker number, and
polls every few seconds until the run has ended. Messages are small JSON objects; nothing in them is
executed. A request without the cluster's secret gets status 403.
"""

from __future__ import annotations

import hmac
import http.client
import json
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from pipeline.errors import InputError, WorkerLost

POLL_SECONDS = 2.0
LOST_SECONDS = 60.0
_ANSWER_SECONDS = 5.0
_MOST_BYTES = 1 << 20


def _machine(process: str) -> str:
    """The machine of a process that is named "machine (number)"."""
    return process.partition(" (")[0]


def _authorization(secret: str) -> str:
    return f"Bearer {secret}"


class Meeting:
    """The head's side: the server, and the record of the hosts that joined.

    Args:
        address: (host, port) to listen on.
        software: the head's software (see `host.software`).
        hosts: number of hosts that have to join.
        tell: prints a line about a host.
        secret: the secret that every host must send; empty for none.
        clock: the head's clock, in seconds since 1970.

    Raises:
        InputError: it cannot listen on `address`.
    """

    def __init__(
        self,
        address: tuple[str, int],
        software: Mapping[str, Any],
        hosts: int,
        tell: Callable[[str], None],
        secret: str = "",
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._software, self._hosts, self._tell, self._clock = software, hosts, tell, clock
        self._lock = threading.Condition()
        self._joined: dict[int, tuple[str, float]] = {}
        self._heard: dict[int, float] = {}
        self._since = 0.0  # when the first host was heard after none was
        self._notified: set[str] = set()
        self._refused: dict[int, str] = {}
        self._state: dict[str, Any] = {"state": "waiting", "status": 0}
        meeting = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self._authorized():
                    self._answer(meeting.facts())

            def do_POST(self) -> None:
                if not self._authorized():
                    return
                try:
                    length = int(self.headers.get("Content-Length") or 0)
                    sent = json.loads(self.rfile.read(min(max(length, 0), _MOST_BYTES)))
                    answer = meeting.hear(int(sent["worker"]), str(sent["process"]), sent["cause"])
                except (ValueError, KeyError, TypeError):
                    self.send_error(400)
                    return
                self._answer(answer)

            def _authorized(self) -> bool:
                sent = self.headers.get("Authorization", "")
                # In constant time, so that the time of an answer reveals nothing about the secret.
                if hmac.compare_digest(sent.encode(), _authorization(secret).encode()):
                    return True
                self.send_error(403)
                return False

            def _answer(self, tree: Mapping[str, Any]) -> None:
                data = json.dumps(tree).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        ThreadingHTTPServer.daemon_threads = True
        try:
            self._server = ThreadingHTTPServer(address, Handler)
        except OSError as error:
            raise InputError(
                f"join: cannot listen on {address[0]}:{address[1]} ({error})"
            ) from error
        threading.Thread(target=self._server.serve_forever, name="meeting", daemon=True).start()

    @property
    def port(self) -> int:
        """The port it listens on."""
        return self._server.server_address[1]

    def facts(self) -> dict[str, Any]:
        """The head's software, its clock and the state of the run."""
        return {**self._state, **self._software, "time": self._clock()}

    def hear(self, worker: int, process: str, cause: str) -> dict[str, Any]:
        """Record a host's first report or its heartbeat; return the answer.

        Args:
            worker: its number in the slice.
            process: the sender, "machine (number)", to detect two machines with one number.
            cause: why it will not join; empty if it does.
        """
        with self._lock:
            if cause:
                self._refused[worker] = cause
                if self._joined.get(worker, ("",))[0] == process:
                    del self._joined[worker]
                self._tell(cause)
            else:
                cause = self._register(worker, process)
            self._lock.notify_all()
            return {**self._state, "cause": cause}

    def _register(self, worker: int, process: str) -> str:
        holder, since = self._joined.get(worker, (process, 0.0))
        if not 0 <= worker < self._hosts:
            return f"worker id {worker} is not one of {self._hosts}"
        returns = _machine(holder) == _machine(process)
        if not returns and time.monotonic() - since < LOST_SECONDS:
            cause = f"worker id {worker} is that of another host, {holder}"
            self._tell(f"{process}: {cause}")
            return cause
        if worker not in self._joined or holder != process:
            self._tell(f"host {worker} of {self._hosts} joined: {process}")
        self._refused.pop(worker, None)
        now = time.monotonic()
        self._since = self._since if self._live() else now
        self._joined[worker], self._heard[worker] = (process, now), now
        if self._state["state"] == "ended":
            self._notified.add(process)
        return ""

    def wait(self, seconds: float, first: float) -> None:
        """Return once every host has joined.

        Args:
            seconds: the deadline, from when the first host reports.
            first: the deadline of the first host's report.

        Raises:
            InputError: at a deadline; it names the missing hosts and why.
        """
        with self._lock:
            if not self._lock.wait_for(lambda: bool(self._joined or self._refused), first):
                raise InputError(f"join: none of {self._hosts} hosts within {first:.0f} s")
            if self._lock.wait_for(lambda: len(self._joined) == self._hosts, seconds):
                self._state = {**self._state, "state": "running"}
                return
            missing = [n for n in range(self._hosts) if n not in self._joined]
            why = [self._refused.get(n, f"host {n} did not answer") for n in missing]
        raise InputError(
            f"join: {len(self._joined)} of {self._hosts} hosts within {seconds:.0f} s of the "
            f"first; {'; '.join(why)}"
        )

    def stranded(self, seconds: float) -> str:
        """The hosts for which others have waited for longer than `seconds`; empty if none.

        Machines that wait are billed; where no host is left, nothing is.
        """
        with self._lock:
            before = time.monotonic() - seconds
            since = [max(self._since, self._heard.get(n, 0.0)) for n in range(self._hosts)]
            late = [str(n) for n, heard in enumerate(since) if heard < before]
            return ", ".join(late) if self._live() else ""

    def _live(self) -> set[str]:
        alive = time.monotonic() - LOST_SECONDS
        return {process for process, since in self._joined.values() if since > alive}

    def end(self, status: int, seconds: float = 5 * POLL_SECONDS) -> None:
        """Wait until every live host has read that the run ended, or `seconds`; then shut down."""
        with self._lock:
            self._state = {"state": "ended", "status": status}
            live = self._live()
            self._lock.wait_for(lambda: live <= self._notified, seconds)
        self._server.shutdown()
        self._server.server_close()


class Head:
    """A host's side: the client of the head's `Meeting`.

    Args:
        address: (host, port) of the head's meeting.
        secret: the cluster's secret; empty for none.
    """

    def __init__(self, address: tuple[str, int], secret: str = "") -> None:
        self._address, self._secret = address, secret

    def facts(self, seconds: float) -> tuple[dict[str, Any], float]:
        """Wait for the head; return its facts and the seconds that this clock is ahead of its.

        Raises:
            InputError: when it does not answer within `seconds`.
        """
        deadline = time.monotonic() + seconds
        while True:
            before = time.time()
            try:
                found = self._ask("GET", None)
            except OSError as error:
                if time.monotonic() > deadline:
                    host, port = self._address
                    raise InputError(
                        f"join: no head answers at {host}:{port} within {seconds:.0f} s ({error}); "
                        "is it up, and can hosts reach its ports?"
                    ) from error
                time.sleep(1.0)
                continue
            # The head read its clock about halfway between the request and its answer.
            return found, (before + time.time()) / 2 - found["time"]

    def report(self, worker: int, process: str, cause: str = "") -> dict[str, Any]:
        """Report this host; return the head's answer.

        Raises:
            OSError: when it does not answer.
        """
        return self._ask("POST", {"worker": worker, "process": process, "cause": cause})

    def until_ended(self, worker: int, process: str, check: Callable[[], None]) -> int:
        """Report until the run has ended; return the run's exit status.

        Args:
            worker: this host's number.
            process: identifies the process of this host.
            check: raises `WorkerLost` when Ray has ended on this host.

        Raises:
            WorkerLost: the head did not answer for `LOST_SECONDS`, or `check` raised it.
        """
        heard = time.monotonic()
        while True:
            try:
                if (answer := self.report(worker, process))["state"] == "ended":
                    return int(answer["status"])
                heard = time.monotonic()
                self._check(worker, process, check)
            except OSError as error:
                if time.monotonic() - heard > LOST_SECONDS:
                    message = f"join: the head did not answer for {LOST_SECONDS:.0f} s ({error})"
                    raise WorkerLost(message) from error
            time.sleep(POLL_SECONDS)

    def _check(self, worker: int, process: str, check: Callable[[], None]) -> None:
        try:
            check()
        except WorkerLost as error:
            self.report(worker, process, f"{process}: {error}")
            raise

    def _ask(self, method: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        connection = http.client.HTTPConnection(*self._address, timeout=_ANSWER_SECONDS)
        try:
            data = None if body is None else json.dumps(body).encode()
            headers = {"Authorization": _authorization(self._secret)}
            connection.request(method, "/", data, headers)
            response = connection.getresponse()
            if response.status == 403:
                raise InputError(
                    "join: the head has another secret; give all hosts the same --shared"
                )
            answer = json.loads(response.read())
            answer["state"]  # raises if another program listens on that port
            return answer
        except (http.client.HTTPException, ValueError, LookupError, TypeError) as error:
            raise ConnectionError(f"{type(error).__name__}: {error}") from error
        finally:
            connection.close()
