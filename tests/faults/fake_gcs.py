"""Google Cloud Storage in memory, as far as gcsfs and TensorStore speak it, with faults on demand.

`with FakeGCS() as server:` sets the environment for this process and those it starts.
It keeps what the real service promises: generations, `ifGenerationMatch` on every kind of upload
and on delete, listings that show every write. The knobs in `Faults` break it on purpose.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from typing import Any
from unittest import mock
from urllib.parse import parse_qsl, unquote, urlsplit

import fsspec.config

from tests.faults.fake_gcs_store import BEFORE, Faults, Refused, Store, Stored, describe
from tests.faults.http_server import Connection, Running

__all__ = ["FakeGCS", "Faults"]

OBJECT = re.compile(r"^(/download)?/storage/v1/b/([^/]+)/o/([^/]+)$")
COPY = re.compile(r"^/storage/v1/b/([^/]+)/o/([^/]+)/(rewriteTo|copyTo)/b/([^/]+)/o/([^/]+)$")
LISTING = re.compile(r"^/storage/v1/b/([^/]+)/o$")
BUCKET = re.compile(r"^/storage/v1/b/([^/]+)$")
BUCKET_FACTS: dict[str, Any] = {"location": "US-CENTRAL1"}
UPLOAD = re.compile(r"^(?:/resumable)?/upload/storage/v1/b/([^/]+)/o$")


class Answer:
    """What goes back."""

    def __init__(
        self,
        status: int,
        body: bytes = b"",
        headers: dict[str, str] | None = None,
        content_type: str = "application/json",
    ) -> None:
        self.status = status
        self.body = body
        self.headers = {"Content-Type": content_type, **(headers or {})}

    @classmethod
    def json(cls, tree: Any, status: int = 200) -> Answer:
        """A JSON answer."""
        return cls(status, json.dumps(tree).encode())


class Handler(Connection):
    """One connection of a client."""

    store: Store

    def do_GET(self) -> None:
        """Any request."""
        store = self.store
        url = urlsplit(self.path)
        query = dict(parse_qsl(url.query, keep_blank_values=True))
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with store.lock:
            store.requests += 1
            fault = store.faults.kind()
        if store.faults.late in self.path or store.faults.late.encode() in body[:1000]:
            time.sleep(store.faults.latency_seconds)
        if fault == "reset":
            return self._reset(url.path, query)
        if fault in BEFORE:
            answer = _error(int(fault), "injected")
        else:
            answer = self._answer(url.path, query, body)
        with store.lock:
            if store.faults.lose and self.command != "GET" and answer.status < 300:
                store.faults.lose -= 1
                fault = "lost"
        if fault == "lost":
            return self._reset(url.path, query)
        store.log.append((self.command, url.path, query, answer.status))
        return self._send(answer, fault)

    do_POST = do_PUT = do_DELETE = do_HEAD = do_GET

    def _answer(self, path: str, query: dict[str, str], body: bytes) -> Answer:
        try:
            if path.startswith("/batch/"):
                return self._batch(body)
            headers = {name.title(): value for name, value in self.headers.items()}
            if self.store.private and "Authorization" not in headers:
                raise Refused(401, "Anonymous caller does not have access")
            return _carry_out(self.store, self.command, path, query, headers, body)
        except Refused as refused:
            return _error(refused.status, refused.message)

    def _reset(self, path: str, query: dict[str, str]) -> None:
        self.store.log.append((self.command, path, query, 0))
        self.reset()

    def _send(self, answer: Answer, fault: str) -> None:
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        if answer.status != 204:
            self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        half = len(answer.body) // 2
        if fault in ("short", "slow"):
            self.wfile.write(answer.body[:half])
            self.wfile.flush()
            if fault == "short" and answer.body:
                self.close_connection = True
                return
            time.sleep(self.store.faults.slow_seconds)
            self.wfile.write(answer.body[half:])
        else:
            self.wfile.write(answer.body)

    def _batch(self, body: bytes) -> Answer:
        """Several deletes in one request."""
        parts = []
        for line in re.findall(rb"DELETE (\S+) HTTP", body):
            url = urlsplit(line.decode())
            try:
                answer = _carry_out(
                    self.store, "DELETE", url.path, dict(parse_qsl(url.query)), {}, b""
                )
            except Refused as refused:
                answer = _error(refused.status, refused.message)
            text = answer.body.decode()
            parts.append(
                "--batch_1\r\nContent-Type: application/http\r\n\r\n"
                f"HTTP/1.1 {answer.status} -\r\n\r\n{text}\r\n"
            )
        return Answer(
            200, "".join([*parts, "--batch_1--"]).encode(), {}, "multipart/mixed; boundary=batch_1"
        )


def _error(status: int, message: str) -> Answer:
    return Answer.json({"error": {"code": status, "message": message}}, status)


def _carry_out(
    store: Store,
    method: str,
    path: str,
    query: dict[str, str],
    headers: dict[str, str],
    body: bytes,
) -> Answer:
    """Do what a request asks. Raises `Refused`."""
    if found := COPY.match(path):
        source, name, verb, target, copy = (unquote(part) for part in found.groups())
        original = store.get(source, name, {})
        made = describe(target, store.put(target, copy, original.data, query, {}))
        return Answer.json({"done": True, "resource": made} if verb == "rewriteTo" else made)
    if found := OBJECT.match(path):
        download, bucket, name = found.group(1), unquote(found.group(2)), unquote(found.group(3))
        if method == "DELETE":
            store.delete(bucket, name, query)
            return Answer(204)
        stored = store.get(bucket, name, query)
        if download or query.get("alt") == "media":
            return _media(stored, headers.get("Range", ""))
        return Answer.json(describe(bucket, stored))
    if found := UPLOAD.match(path):
        return _upload(store, method, unquote(found.group(1)), query, headers, body)
    if found := LISTING.match(path):
        return Answer.json(store.list(unquote(found.group(1)), query))
    if found := BUCKET.match(path):
        name = unquote(found.group(1))
        store.bucket(name)
        return Answer.json(_bucket(name))
    if path == "/storage/v1/b" and method == "POST":
        name = json.loads(body)["name"]
        store.buckets.setdefault(name, {})
        return Answer.json(_bucket(name))
    if path == "/storage/v1/b":
        rows = [_bucket(name) for name in store.buckets]
        return Answer.json({"kind": "storage#buckets", "items": rows})
    raise Refused(501, f"not spoken here: {method} {path}")


def _bucket(name: str) -> dict[str, Any]:
    return {"kind": "storage#bucket", "name": name, "id": name, **BUCKET_FACTS}


def _media(stored: Stored, range_: str) -> Answer:
    size = len(stored.data)
    headers = {
        "x-goog-generation": str(stored.generation),
        "x-goog-metageneration": "1",
        "x-goog-stored-content-length": str(size),
        "x-goog-stored-content-encoding": "identity",
        "ETag": str(stored.generation),
    }
    if not range_:
        return Answer(200, stored.data, headers, stored.content_type)
    first, _, last = range_.removeprefix("bytes=").partition("-")
    start = int(first) if first else max(size - int(last), 0)
    stop = min(int(last) + 1, size) if first and last else size
    if start >= size:
        raise Refused(416, "Requested range not satisfiable")
    headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
    return Answer(206, stored.data[start:stop], headers, stored.content_type)


def _upload(
    store: Store,
    method: str,
    bucket: str,
    query: dict[str, str],
    headers: dict[str, str],
    body: bytes,
) -> Answer:
    if session := query.get("upload_id"):
        if method == "DELETE":
            store.abandon(session)
            return Answer(499)
        stored, held = store.extend(session, headers.get("Content-Range", ""), body)
        if stored is None:
            return Answer(308, b"", {"Range": f"bytes=0-{held - 1}"} if held else {})
        return Answer.json(describe(bucket, stored))
    kind = query.get("uploadType")
    if kind == "media":
        about = {"contentType": headers.get("Content-Type")}
        return Answer.json(describe(bucket, store.put(bucket, query["name"], body, query, about)))
    if kind == "resumable":
        about = json.loads(body) if body else {}
        name = query.get("name") or about["name"]
        return Answer(200, b"{}", {"Location": store.begin(bucket, name, query, about)})
    boundary = b"--" + headers["Content-Type"].partition("boundary=")[2].strip('"').encode()
    _, first, rest = body.split(boundary, 2)
    about = json.loads(re.split(rb"\r?\n\r?\n", first, maxsplit=1)[1])
    data = re.split(rb"\r?\n\r?\n", rest, maxsplit=1)[1]
    end = data.rindex(boundary)  # the data itself may hold anything
    data = data[:end].removesuffix(b"\r\n" if first.startswith(b"\r") else b"\n")
    name = query.get("name") or about["name"]
    return Answer.json(describe(bucket, store.put(bucket, name, data, query, about)))


def environment(root: str) -> dict[str, str]:
    """What a process needs to take the server at this URL for the real one."""
    return {
        "STORAGE_EMULATOR_HOST": root,
        "TENSORSTORE_GCS_HTTP_URL": root,
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # its probe speaks gRPC to the real one
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token",
        "NO_GCE_CHECK": "true",
        "FSSPEC_GS": '{"token": "anon"}',
    }


class FakeGCS(Running, Store):
    """The server.

    Args:
        buckets: those that exist.
        page: listings come in pages of this many entries.
    """

    def __init__(self, *, buckets: tuple[str, ...] = ("bucket",), page: int = 1000) -> None:
        Store.__init__(self, buckets, page)
        Running.__init__(self, Handler, store=self)

    def environment(self) -> dict[str, str]:
        """What a process needs to take this server for the real one."""
        return environment(self.root)

    def contexts(self) -> list[contextlib.AbstractContextManager[Any]]:
        # fsspec read the variables when this process began.
        options = json.loads(self.environment()["FSSPEC_GS"])
        return [
            mock.patch.dict("os.environ", self.environment()),
            mock.patch.dict(fsspec.config.conf, {"gs": options}),
        ]
