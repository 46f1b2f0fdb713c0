"""What the servers in memory share: connections that end quietly, and a server in a thread."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


class Connection(BaseHTTPRequestHandler):
    """One connection of a client; one that goes away is no event."""

    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # an answer in pieces would wait for the client's delayed acknowledgement
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):
            super().handle()

    def finish(self) -> None:
        with contextlib.suppress(ConnectionError):
            super().finish()

    def reset(self) -> None:
        """Drop the connection; the peer sees a reset, not an orderly end."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()
        raise ConnectionResetError


class _Server(ThreadingHTTPServer):
    """A thread a connection; takes as many connections at once as a client may open."""

    daemon_threads = True
    request_queue_size = 512  # past it the kernel has a client wait a second, then try again


class Running:
    """A server at `root` that answers inside a `with` block, and what is entered with it."""

    def __init__(self, connection: type[Connection], **attributes: Any) -> None:
        self._server = _Server(("127.0.0.1", 0), type("Bound", (connection,), attributes))
        self.root = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._stack = contextlib.ExitStack()

    def contexts(self) -> list[contextlib.AbstractContextManager[Any]]:
        return []

    def __enter__(self) -> Self:
        serve = self._server.serve_forever
        threading.Thread(target=serve, args=(0.05,), daemon=True).start()
        self._stack.callback(self._server.server_close)
        self._stack.callback(self._server.shutdown)
        for context in self.contexts():
            self._stack.enter_context(context)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
