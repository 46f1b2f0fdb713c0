"""Where the hosts of a cluster meet: the head answers over HTTP, beside Ray and before it.

A host learns what the head runs before it starts anything, reports which worker it is, and asks
every few seconds whether the run has ended. Messages are small JSON objects; nothing in them is
executed. Who does not send the cluster's secret is not answered.
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


def _authorization(secret: str) -> str:
    return f"Bearer {secret}"


class Meeting:
    """The head's side.

    Args:
        address: (host, port) to listen on.
        software: what the head runs (see `host.software`).
        hosts: how many there have to be.
        tell: takes a line about a host.
        secret: that every host must send; empty for none.
        clock: the head's, in seconds since 1970.

    Raises:
        InputError: when it cannot listen there.
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
        self._aware: set[str] = set()
        self._refused: dict[int, str] = {}
        self._state: dict[str, Any] = {"state": "waiting", "status": 0}
        meeting = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self._may():
                    self._answer(meeting.facts())

            def do_POST(self) -> None:
                if not self._may():
                    return
                length = min(int(self.headers.get("Content-Length") or 0), _MOST_BYTES)
                try:
                    asked = json.loads(self.rfile.read(length))
                    answer = meeting.hear(
                        int(asked["worker"]), str(asked["process"]), asked["cause"]
                    )
                except (ValueError, KeyError, TypeError):
                    self.send_error(400)
                    return
                self._answer(answer)

            def _may(self) -> bool:
                sent = self.headers.get("Authorization", "")
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
        """What the head runs, its clock and how far the run is."""
        return {**self._state, **self._software, "time": self._clock()}

    def hear(self, worker: int, process: str, cause: str) -> dict[str, Any]:
        """A host reports: for the first time, or that it is still there.

        Args:
            worker: its number in the slice.
            process: what tells two processes with one number apart.
            cause: why it will not join; empty if it does.
        """
        with self._lock:
            if cause:
                self._refused[worker] = cause
                if self._joined.get(worker, ("",))[0] == process:
                    del self._joined[worker]
                self._tell(cause)
            else:
                cause = self._take(worker, process)
            self._lock.notify_all()
            return {**self._state, "cause": cause}

    def _take(self, worker: int, process: str) -> str:
        holder, since = self._joined.get(worker, (process, 0.0))
        if not 0 <= worker < self._hosts:
            return f"worker id {worker} is not one of {self._hosts}"
        if holder != process and time.monotonic() - since < LOST_SECONDS:
            cause = f"worker id {worker} is that of another host, {holder}"
            self._tell(f"{process}: {cause}")
            return cause
        if worker not in self._joined or holder != process:
            self._tell(f"host {worker} of {self._hosts} joined: {process}")
        self._refused.pop(worker, None)
        self._joined[worker] = (process, time.monotonic())
        if self._state["state"] == "ended":
            self._aware.add(process)
        return ""

    def wait(self, seconds: float) -> None:
        """Return once every host has joined.

        Raises:
            InputError: at the deadline, naming who is missing and why.
        """
        with self._lock:
            if self._lock.wait_for(lambda: len(self._joined) == self._hosts, seconds):
                self._state = {**self._state, "state": "running"}
                return
            missing = [n for n in range(self._hosts) if n not in self._joined]
            why = [self._refused.get(n, f"host {n} did not answer") for n in missing]
        raise InputError(
            f"join: {len(self._joined)} of {self._hosts} hosts within {seconds:.0f} s; "
            + "; ".join(why)
        )

    def end(self, status: int, seconds: float = 5 * POLL_SECONDS) -> None:
        """Let every host know that the run has ended, then stop answering."""
        with self._lock:
            self._state = {"state": "ended", "status": status}
            alive = time.monotonic() - LOST_SECONDS
            there = {process for process, since in self._joined.values() if since > alive}
            self._lock.wait_for(lambda: there <= self._aware, seconds)
        self._server.shutdown()
        self._server.server_close()


class Head:
    """A host's side.

    Args:
        address: (host, port) of the head's meeting.
        secret: the cluster's; empty for none.
    """

    def __init__(self, address: tuple[str, int], secret: str = "") -> None:
        self._address, self._secret = address, secret

    def facts(self, seconds: float) -> tuple[dict[str, Any], float]:
        """The head's facts, and the seconds that this clock is ahead of its; waits for it.

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
                        "is it up, and may hosts reach its ports?"
                    ) from error
                time.sleep(1.0)
                continue
            return found, (before + time.time()) / 2 - found["time"]

    def report(self, worker: int, process: str, cause: str = "") -> dict[str, Any]:
        """Report this host; the head's answer.

        Raises:
            OSError: when it does not answer.
        """
        return self._ask("POST", {"worker": worker, "process": process, "cause": cause})

    def until_ended(self, worker: int, process: str, check: Callable[[], None]) -> int:
        """Report until the run has ended; its status.

        Args:
            worker: this host's number.
            process: what tells it from others.
            check: raises `WorkerLost` when what runs here has ended.

        Raises:
            WorkerLost: when the head is gone, or by `check`.
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
            answer["state"]  # what else may listen on that port has none
            return answer
        except (http.client.HTTPException, ValueError, LookupError, TypeError) as error:
            raise ConnectionError(f"{type(error).__name__}: {error}") from error
        finally:
            connection.close()
