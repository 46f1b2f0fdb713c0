"""The Hugging Face hub in memory, as far as `HfFileSystem` speaks it, with faults on demand.

In a test, `with FakeHub({"data/x.parquet": content}) as hub:` makes hf:// of this process and of
those it starts go there. One dataset repository `owner/name` at the commit `COMMIT` is served;
the same files are at `hub.web(path)` for plain http. What was asked for is in `hub.log`.

The fault of a request is decided by the seed, the request and how often it was made before, so it
does not depend on the order in which threads ask.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock
from urllib.parse import parse_qs, unquote, urlsplit

import fsspec.config

from tests.faults.http_server import Connection, Running

COMMIT = "c0ffee" + "0" * 34
REPOSITORY = "owner/name"
SIGNATURE = "signature-that-nobody-may-see"
# What passes when it is asked again; and what does not, or is not seen.
PASSING = ("429", "429 wait", "500", "503", "reset", "torn", "cut", "short", "slow")
LASTING = ("401", "404", "flip")


@dataclass
class Faults:
    """What goes wrong.

    Attributes:
        probability: of a fault, per request.
        kinds: of `PASSING` and `LASTING`. "torn" resets in the middle of a body, "cut" ends it
            there, "short" sends half of it and says that this is all, "flip" changes a bit.
        seed: of the draw.
        only: a regular expression that the request's path must match.
        retry_after: seconds that "429 wait" asks for.
        slow_seconds: how long "slow" pauses in the middle of a body.
    """

    probability: float = 0.0
    kinds: tuple[str, ...] = PASSING
    seed: int = 0
    only: str = ""
    retry_after: float = 0
    slow_seconds: float = 0.01


class Request(NamedTuple):
    """One request: `start` and `stop` of the bytes sent, None where it was no file's body."""

    method: str
    path: str
    status: int
    fault: str
    start: int | None
    stop: int | None
    headers: dict[str, str]


class Answer(NamedTuple):
    """What goes back, before any fault."""

    status: int
    headers: dict[str, str]
    body: bytes = b""
    start: int | None = None


class FakeHub(Running):
    """The server.

    Args:
        files: content by path in the repository; may be changed while it serves.
        token: the only one that may read; empty for a public repository.
        redirect: whether files come from another address, as the real hub's large ones do.
        page: listings come in pages of this many entries.
        ranges: whether plain http knows ranges.
    """

    def __init__(
        self,
        files: dict[str, bytes],
        *,
        token: str = "",
        redirect: bool = False,
        page: int = 1000,
        ranges: bool = True,
    ) -> None:
        self.files, self.token, self.redirect = dict(files), token, redirect
        self.page, self.ranges = page, ranges
        self.uploads: dict[str, dict[str, bytes]] = {}  # repository -> content by path
        self.head = COMMIT  # where the branch main points
        self.faults = Faults()
        self.log: list[Request] = []
        self.asked: Counter[str] = Counter()
        self.lock = threading.Lock()
        super().__init__(Handler, hub=self)

    @property
    def source(self) -> str:
        """The repository at its commit."""
        return f"hf://datasets/{REPOSITORY}@{COMMIT}"

    def web(self, path: str) -> str:
        """The http address of a file."""
        return f"{self.root}/web/{path}"

    def environment(self) -> dict[str, str]:
        """What a process needs to take this server for the real one."""
        return {
            "HF_ENDPOINT": self.root,
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_OFFLINE": "0",
            "FSSPEC_HF": json.dumps({"endpoint": self.root}),
        }

    def fault(self, key: str, path: str) -> str:
        """The fault of the next request; empty for none."""
        faults = self.faults
        with self.lock:
            self.asked[key] += 1
            draw = random.Random(f"{faults.seed}|{key}|{self.asked[key]}")
        if not re.search(faults.only, path) or draw.random() >= faults.probability:
            return ""
        return draw.choice(faults.kinds)

    def injected(self) -> int:
        """How many faults there were."""
        return sum(bool(request.fault) for request in self.log)

    def ranges_of(self, path: str) -> list[tuple[int, int]]:
        """The byte ranges of a file that were sent, in order."""
        found = [r for r in self.log if r.path.endswith("/" + path) and r.start is not None]
        return [(r.start or 0, r.stop or 0) for r in found]

    def contexts(self) -> list[contextlib.AbstractContextManager[Any]]:
        return [mock.patch.dict("os.environ", self.environment()), _endpoint(self.root)]


@contextlib.contextmanager
def _endpoint(root: str) -> Iterator[None]:
    """hf:// of this process goes to `root`: the hub's own variable is read when it is imported."""
    from huggingface_hub import HfFileSystem, constants

    HfFileSystem.clear_instance_cache()
    try:
        with (
            mock.patch.dict(fsspec.config.conf, {"hf": {"endpoint": root}}),
            mock.patch.object(constants, "HF_HUB_OFFLINE", False),
        ):
            yield
    finally:
        HfFileSystem.clear_instance_cache()


class Handler(Connection):
    """One connection of a client."""

    hub: FakeHub

    def do_GET(self) -> None:
        """Any request."""
        url = urlsplit(self.path)
        path = unquote(url.path)
        key = f"{self.command} {self.path.partition('Signature')[0]} {self.headers.get('Range')}"
        fault = self.hub.fault(key, path)
        answer = self._injected(fault) or self._answer(path, parse_qs(url.query))
        if fault == "flip" and answer.start is not None and answer.body:
            body = bytearray(answer.body)
            draw = random.Random(key)
            body[draw.randrange(len(body))] ^= 1 << draw.randrange(8)
            answer = answer._replace(body=bytes(body))
        if fault == "short" and self.command != "HEAD":
            answer = answer._replace(body=answer.body[: len(answer.body) // 2])
        stop = None if answer.start is None else answer.start + len(answer.body)
        status = 0 if fault == "reset" else answer.status
        start = answer.start if self.command == "GET" else None
        self.hub.log.append(
            Request(self.command, path, status, fault, start, stop, dict(self.headers))
        )
        if fault == "reset":
            self.reset()
        self._send(answer, fault)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        """Make a repository of a model, or commit files to it."""
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = unquote(urlsplit(self.path).path)
        fault = self.hub.fault(f"POST {path}", path)
        answer = self._injected(fault) or self._accept(path, body)
        self.hub.log.append(Request("POST", path, answer.status, fault, None, None, {}))
        self._send(answer, "")

    def _accept(self, path: str, body: bytes) -> Answer:
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = "/".join(filter(None, (asked.get("organization"), asked["name"])))
            return _json({"url": f"{self.hub.root}/{name}"})
        if path == "/api/validate-yaml":
            return _json({"errors": [], "warnings": []})
        found = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(preupload|commit)/main", path)
        if found is None:
            return _missing("RepoNotFound")
        if found[2] == "preupload":
            kept = {"uploadMode": "regular", "shouldIgnore": False}
            rows = [{"path": f["path"], **kept} for f in json.loads(body)["files"]]
            return _json({"files": rows})
        files = self.hub.uploads.setdefault(found[1], {})
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        url = f"{self.hub.root}/{found[1]}/commit/{COMMIT}"
        return _json({"success": True, "commitOid": COMMIT, "commitUrl": url})

    def _injected(self, fault: str) -> Answer | None:
        if not fault[:3].isdigit():
            return None
        waits = {"Retry-After": str(self.hub.faults.retry_after)} if "wait" in fault else {}
        return Answer(int(fault[:3]), waits, b'{"error":"injected"}')

    def _send(self, answer: Answer, fault: str) -> None:
        self.send_response(answer.status)
        for name, value in {"Content-Length": str(len(answer.body)), **answer.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if fault not in ("torn", "cut", "slow") or not answer.body:
            self.wfile.write(answer.body)
            return
        half = len(answer.body) // 2
        self.wfile.write(answer.body[:half])
        self.wfile.flush()
        if fault == "torn":
            self.reset()
        if fault == "cut":
            self.close_connection = True
            return
        time.sleep(self.hub.faults.slow_seconds)
        self.wfile.write(answer.body[half:])

    def _answer(self, path: str, query: dict[str, list[str]]) -> Answer:
        hub = self.hub
        if found := re.fullmatch(r"/(?:web|cdn)/(.*)", path):
            content = hub.files.get(found[1])
            if content is None:
                return self._index(found[1]) if path.startswith("/web/") else _json({}, 404)
            web = path.startswith("/web/")
            return self._bytes(content, {"Content-Type": "application/octet-stream"}, web)
        if hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
            return _json({"error": "Invalid username or password."}, 401)
        if found := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)(?:/revision/([^/]+))?", path):
            if found[1] != REPOSITORY:
                return _missing("RepoNotFound")
            if found[2] not in (None, "main", COMMIT, hub.head):
                return _missing("RevisionNotFound")
            commit = COMMIT if found[2] == COMMIT else hub.head
            return _json({"id": REPOSITORY, "sha": commit, "siblings": [], "tags": [], "_id": "x"})
        if found := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)/tree/([^/]+)(?:/(.*))?", path):
            return self._tree(found[3] or "", query)
        if found := re.fullmatch(r"/datasets/([^/]+/[^/]+)/resolve/([^/]+)/(.*)", path):
            if found[1] != REPOSITORY or found[2] not in ("main", COMMIT):
                return _missing("RepoNotFound")
            return self._resolve(found[3])
        return _missing("RepoNotFound")

    def _resolve(self, path: str) -> Answer:
        content = self.hub.files.get(path)
        if content is None:
            return _missing("EntryNotFound")
        tag = f'"{hashlib.sha256(content).hexdigest()}"'
        if self.hub.redirect:
            sizes = {"X-Linked-ETag": tag, "X-Linked-Size": str(len(content))}
            return Answer(302, {"Location": f"/cdn/{path}?Signature={SIGNATURE}", **sizes})
        return self._bytes(content, {"ETag": tag, "X-Repo-Commit": COMMIT})

    def _bytes(self, content: bytes, headers: dict[str, str], web: bool = False) -> Answer:
        if web:
            headers = {**headers, "ETag": f'"{hashlib.blake2b(content).hexdigest()}"'}
            if self.headers.get("If-Match", headers["ETag"]) != headers["ETag"]:
                return Answer(412, {})
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if not wanted or (web and not self.hub.ranges):
            return Answer(200, headers, content, 0)
        start, stop = int(wanted[1]), min(int(wanted[2]) + 1, len(content))
        if start >= len(content):
            return Answer(416, {"Content-Range": f"bytes */{len(content)}"})
        headers = {**headers, "Content-Range": f"bytes {start}-{stop - 1}/{len(content)}"}
        return Answer(206, headers, content[start:stop], start)

    def _index(self, folder: str) -> Answer:
        names = [name for name in self.hub.files if name.startswith(folder)]
        if not names:
            return _json({}, 404)
        links = "".join(f'<a href="/web/{name}">{name}</a>' for name in sorted(names))
        return Answer(200, {"Content-Type": "text/html"}, f"<html>{links}</html>".encode())

    def _tree(self, folder: str, query: dict[str, list[str]]) -> Answer:
        prefix = folder + "/" if folder else ""
        below = {name: c for name, c in self.hub.files.items() if name.startswith(prefix)}
        if not below:
            return _missing("EntryNotFound")
        deep = query.get("recursive", ["false"])[0].lower() == "true"
        rows: dict[str, Any] = {}
        for name, content in sorted(below.items()):
            parts = name.removeprefix(prefix).split("/")
            for depth in range(1, len(parts) if deep else min(len(parts), 2)):
                path = prefix + "/".join(parts[:depth])
                rows[path] = {"type": "directory", "oid": "d" * 40, "size": 0, "path": path}
            if deep or len(parts) == 1:
                rows[name] = _row(name, content)
        entries, begin = list(rows.values()), int(query.get("cursor", ["0"])[0])
        end = begin + self.hub.page
        links = {}
        if end < len(entries):
            mode = f"recursive={deep}&expand=False"
            address = self.hub.root + urlsplit(self.path).path
            links = {"Link": f'<{address}?{mode}&cursor={end}>; rel="next"'}
        return _json(entries[begin:end], 200, links)


def _row(name: str, content: bytes) -> dict[str, Any]:
    blob = hashlib.sha1(content, usedforsecurity=False).hexdigest()  # Git's, but for its header
    row: dict[str, Any] = {"type": "file", "oid": blob, "size": len(content), "path": name}
    if name.endswith(".parquet"):
        oid = hashlib.sha256(content).hexdigest()
        row["lfs"] = {"oid": oid, "size": len(content), "pointerSize": 134}
    return row


def _json(tree: Any, status: int = 200, headers: dict[str, str] | None = None) -> Answer:
    content = {"Content-Type": "application/json"}
    return Answer(status, {**content, **(headers or {})}, json.dumps(tree).encode())


def _missing(code: str) -> Answer:
    return _json({"error": "not found"}, 404, {"X-Error-Code": code})
