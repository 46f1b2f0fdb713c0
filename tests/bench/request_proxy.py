"""A proxy that notes every request on its way to an HTTP server of somebody else's."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler
from typing import Any, Self
from urllib.parse import parse_qsl, urlsplit

from tests.faults.fake_gcs import Server

Noted = tuple[str, str, dict[str, str], int]  # method, path, query, status
_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length"}


class Proxy:
    """Passes every request on to one server, notes it, and returns the answer unchanged.

    Args:
        host, port: of the server.

    Attributes:
        upstream: host and port of the server.
        root: URL of the proxy.
        log: every request, in the order of the answers.
        latency_seconds: how much later every answer comes.
    """

    def __init__(self, host: str, port: int) -> None:
        self.log: list[Noted] = []
        self.latency_seconds = 0.0
        self.upstream = host, port
        self._server = Server(("127.0.0.1", 0), type("BoundPassing", (_Passing,), {"proxy": self}))
        self.root = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Passing(BaseHTTPRequestHandler):
    """One connection of a client, with one connection to the server."""

    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # an answer in pieces would wait for the client's delayed acknowledgement
    disable_nagle_algorithm = True
    proxy: Proxy

    def setup(self) -> None:
        super().setup()
        self._onward = http.client.HTTPConnection(*self.proxy.upstream, timeout=120)
        self._onward.connect()
        self._onward.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""

    def handle(self) -> None:
        """Serve the connection; a client that goes away is no event."""
        with contextlib.suppress(ConnectionError):
            super().handle()

    def finish(self) -> None:
        """Flush what is left, if anybody still listens, and let go of the server."""
        self._onward.close()
        with contextlib.suppress(ConnectionError):
            super().finish()

    def do_GET(self) -> None:
        """Any request."""
        time.sleep(self.proxy.latency_seconds)
        status, headers, body = self._pass_on(self._body())
        url = urlsplit(self.path)
        query = dict(parse_qsl(url.query, keep_blank_values=True))
        self.proxy.log.append((self.command, url.path, query, status))
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        if status not in (204, 304):
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_PUT = do_DELETE = do_PATCH = do_HEAD = do_GET

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        chunks = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass  # what follows the last chunk
        return b"".join(chunks)

    def _pass_on(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        onward = self._onward
        onward.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in _end_to_end(self.headers.items()):
            onward.putheader(name, value)
        onward.putheader("Content-Length", str(len(body)))
        onward.endheaders(body)
        answer = onward.getresponse()
        return answer.status, _end_to_end(answer.getheaders()), answer.read()


def _end_to_end(headers: Any) -> list[tuple[str, str]]:
    return [(name, value) for name, value in headers if name.lower() not in _HOP_BY_HOP]
