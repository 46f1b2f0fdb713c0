"""Serves pages over HTTP: to this machine, or elsewhere to who has the token.

Nothing can be changed: GET and HEAD are all there is. A request is answered only where

- its Host is an address, this machine's name or the one that was bound, because a page of another
  site can make its own name lead here (DNS rebinding), and
- it has the token, if there is one: in the first link, then in a cookie.

A page of ours runs the scripts of this package and no others. A page from the store may be by
anyone: its scripts run in an origin of their own, from which they reach neither other pages nor a
network.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import ipaddress
import re
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote

from pipeline.errors import InputError, PonenteError, one_line
from pipeline.pages.page import environment

HTML, TEXT = "text/html; charset=utf-8", "text/plain; charset=utf-8"
Query = dict[str, list[str]]
_NOTHING = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; form-action 'none'"
_STORED = f"sandbox allow-scripts; {_NOTHING}; script-src 'unsafe-inline'; frame-ancestors 'none'"
_HEADERS = {
    "Cache-Control": "no-cache",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


@dataclass(frozen=True)
class Answer:
    """What is sent; `ours` for a page that this process rendered, which then asks for itself."""

    body: bytes
    kind: str = HTML
    ours: bool = False
    status: HTTPStatus = HTTPStatus.OK
    location: str = ""


Pages = Callable[[str, Query], Answer | None]
"""(path without its first slash, query) -> the answer, or None for no such page."""


class Server(ThreadingHTTPServer):
    """Answers with `pages`; `scripts` are the texts of the scripts that its own pages have."""

    daemon_threads = True

    def __init__(
        self, address: tuple[str, int], pages: Pages, scripts: Iterable[str] = (), token: str = ""
    ) -> None:
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        self.pages, self.token = pages, token
        self.live = environment().get_template("live.js").render()
        digests = (hashlib.sha256(text.encode()).digest() for text in (self.live, *scripts))
        sources = " ".join(f"'sha256-{base64.b64encode(each).decode()}'" for each in digests)
        self.policy = f"{_NOTHING}; script-src {sources}; connect-src 'self'; base-uri 'none'; "
        self.policy += "frame-ancestors 'none'"
        self.names = {"localhost", address[0].lower(), socket.gethostname().lower()} - {""}
        try:
            super().__init__(address, _Handler)
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or error
            raise InputError(
                f"cannot listen on {address[0]}:{address[1]} ({why}); give "
                "another --port, or --port 0 for a free one"
            ) from error

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: a browser may drop a connection at any moment, and an answer has its own."""

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        host = f"[{host}]" if ":" in str(host) else host
        return f"http://{host}:{port}/" + (f"?token={self.token}" if self.token else "")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address, or a name that is `localhost`."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "ponente", ""
    timeout = 60  # of a connection on which nothing is asked

    @property
    def _own(self) -> Server:
        assert isinstance(self.server, Server)
        return self.server

    def do_GET(self) -> None:
        path, _, text = self.path.partition("?")
        query = parse_qs(text)
        # The first connection of a browser may be dropped while its answer is made.
        with contextlib.suppress(ConnectionError):
            if refused := self._refusal(query):
                self._send(Answer(refused[1].encode(), TEXT, status=refused[0]))
            elif query.pop("token", None):
                place = "/" + path.lstrip("/")  # "//host" would be another server's
                self._send(Answer(b"", TEXT, status=HTTPStatus.SEE_OTHER, location=place))
            else:
                self._send(self._answer(unquote(path).removeprefix("/"), query))

    do_HEAD = do_GET

    def _other(self) -> None:
        self.close_connection = True
        with contextlib.suppress(ConnectionError):
            text = b"this server only answers GET and HEAD\n"
            self._send(Answer(text, TEXT, status=HTTPStatus.METHOD_NOT_ALLOWED))

    do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = _other

    def _refusal(self, query: Query) -> tuple[HTTPStatus, str] | None:
        name = re.sub(r":\d*$", "", self.headers.get("Host", "")).lower()
        with contextlib.suppress(ValueError):
            ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
            name = "localhost"
        if name not in self._own.names:
            return HTTPStatus.MISDIRECTED_REQUEST, "this server does not have the name asked for\n"
        given = query.get("token", [])
        with contextlib.suppress(CookieError, KeyError):
            given = [*given, SimpleCookie(self.headers.get("Cookie", ""))[self._cookie].value]
        wanted = self._own.token.encode()
        if wanted and not any(hmac.compare_digest(each.encode(), wanted) for each in given):
            text = "open the link that `ponente dashboard` printed: it has the token\n"
            return HTTPStatus.FORBIDDEN, text
        return None

    @property
    def _cookie(self) -> str:  # cookies are the same for all ports of a host
        return f"ponente-{self._own.server_address[1]}"

    def _answer(self, path: str, query: Query) -> Answer:
        try:
            found = self._own.pages(path, query)
            missing = f"there is no page {path!r}\n".encode()
            return found or Answer(missing, TEXT, status=HTTPStatus.NOT_FOUND)
        except InputError as error:
            return Answer(f"{error}\n".encode(), TEXT, status=HTTPStatus.NOT_FOUND)
        except (PonenteError, OSError) as error:
            status = HTTPStatus.SERVICE_UNAVAILABLE
            return Answer(f"{one_line(error)}\n".encode(), TEXT, status=status)
        except Exception as error:  # noqa: BLE001 - one page that fails must not end the others
            status = HTTPStatus.INTERNAL_SERVER_ERROR
            return Answer(f"{one_line(error)}\n".encode(), TEXT, status=status)

    def _send(self, answer: Answer) -> None:
        body = answer.body
        if answer.ours:
            live = f"<script data-live>{self._own.live}</script></body>".encode()
            body = body.replace(b"</body>", live, 1)
        tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
        status = answer.status
        if status == HTTPStatus.OK and tag in self.headers.get("If-None-Match", ""):
            status, body = HTTPStatus.NOT_MODIFIED, b""
        self.send_response(status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Security-Policy", self._own.policy if answer.ours else _STORED)
        self.send_header("Content-Type", answer.kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", tag)
        if answer.location:
            self.send_header("Location", answer.location)
            if self._own.token:
                keep = f"{self._cookie}={self._own.token}; HttpOnly; SameSite=Lax; Path=/"
                self.send_header("Set-Cookie", keep)
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET, HEAD")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: a page asks every few seconds."""
