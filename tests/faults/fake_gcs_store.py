"""What a bucket store holds and refuses: the half of `fake_gcs.py` that knows no HTTP."""

from __future__ import annotations

import base64
import hashlib
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import google_crc32c

BEFORE = ("503", "429", "500", "reset")  # the request is not carried out
AFTER = ("lost", "short", "slow")  # it is carried out; the answer suffers


@dataclass
class Faults:
    """What goes wrong.

    Attributes:
        probability: of a fault, per request; drawn from `seed`.
        kinds: which of `BEFORE` and `AFTER`.
        stale: a listing shows the store as it was this many requests ago.
        own_since: but shows what was written since this request, as a cache shows its own writes.
        lose: the next so many successful writes are stored, but their answer is lost.
        slow_seconds: how long a slow body pauses in its middle.
        latency_seconds: how much later every answer comes.
        late: only those of requests whose URL or upload has this in it; empty for all.
    """

    probability: float = 0.0
    kinds: tuple[str, ...] = (*BEFORE, *AFTER)
    seed: int = 0
    stale: int = 0
    own_since: int | None = None
    lose: int = 0
    slow_seconds: float = 0.02
    latency_seconds: float = 0.0
    late: str = ""

    def __post_init__(self) -> None:
        self._draw = random.Random(self.seed)

    def kind(self) -> str:
        """The fault of the next request; empty for none."""
        if self._draw.random() >= self.probability:
            return ""
        return self._draw.choice(self.kinds)


@dataclass
class Stored:
    """One object."""

    name: str
    data: bytes
    generation: int
    born: int  # number of the request that created the name
    metadata: dict[str, str] = field(default_factory=dict)
    content_type: str = "application/octet-stream"
    updated: str = ""


class Refused(Exception):
    """An answer other than success."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


def describe(bucket: str, stored: Stored) -> dict[str, Any]:
    """An object's resource, as the JSON API gives it."""
    crc = google_crc32c.Checksum(stored.data).digest()
    return {
        "kind": "storage#object",
        "id": f"{bucket}/{stored.name}/{stored.generation}",
        "name": stored.name,
        "bucket": bucket,
        "generation": str(stored.generation),
        "metageneration": "1",
        "size": str(len(stored.data)),
        "contentType": stored.content_type,
        "metadata": stored.metadata,
        "md5Hash": base64.b64encode(hashlib.md5(stored.data).digest()).decode(),  # noqa: S324
        "crc32c": base64.b64encode(crc).decode(),
        "storageClass": "STANDARD",
        "timeCreated": stored.updated,
        "updated": stored.updated,
    }


class Store:
    """Buckets and their objects.

    Args:
        buckets: those that exist.
        page: listings come in pages of this many entries.
    """

    def __init__(self, buckets: tuple[str, ...], page: int) -> None:
        self.buckets: dict[str, dict[str, Stored]] = {name: {} for name in buckets}
        self.faults = Faults()
        self.denied: set[str] = set()  # buckets whose every request is answered 403
        self.private = False  # whether a request without a login is answered 401
        self.over_quota: set[str] = set()  # buckets whose every write is answered 429
        self.page = page
        self.root = ""
        self.requests = 0
        self.log: list[tuple[str, str, dict[str, str], int]] = []  # method, path, query, status
        self.writes: Counter[str] = Counter()  # how often each name was written
        self.lock = threading.RLock()
        self._sessions: dict[str, dict[str, Any]] = {}
        self._dead: list[tuple[str, Stored, int]] = []  # bucket, object, request that deleted it
        # As in the real service, no two writes ever have one generation: of two servers neither.
        self._generation = time.time_ns() // 1000

    def bucket(self, name: str, *, write: bool = False) -> dict[str, Stored]:
        """The objects of a bucket, by name. Raises `Refused`."""
        if name in self.denied:
            raise Refused(403, f"the caller does not have storage.objects access to {name}")
        if name not in self.buckets:
            raise Refused(404, "The specified bucket does not exist.")
        if write and name in self.over_quota:
            raise Refused(429, "The rate of requests exceeds the quota.")
        return self.buckets[name]

    def get(self, bucket: str, name: str, query: dict[str, str]) -> Stored:
        """One object. Raises `Refused`, also for a generation that is not the current one."""
        found = self.bucket(bucket).get(name)
        if found is None or query.get("generation", str(found.generation)) != str(found.generation):
            raise Refused(404, f"No such object: {bucket}/{name}")
        if query.get("ifGenerationMatch", str(found.generation)) != str(found.generation):
            raise Refused(412, "conditionNotMet")
        if query.get("ifGenerationNotMatch") == str(found.generation):
            raise Refused(304, "notModified")
        return found

    def check(self, bucket: str, name: str, query: dict[str, str]) -> None:
        """Raise `Refused` when a write's precondition does not hold."""
        found = self.bucket(bucket, write=True).get(name)
        current = found.generation if found else 0
        if int(query.get("ifGenerationMatch", current)) != current:
            raise Refused(412, "At least one of the pre-conditions you specified did not hold.")

    def put(
        self, bucket: str, name: str, data: bytes, query: dict[str, str], about: dict[str, Any]
    ) -> Stored:
        """Write an object if the precondition holds."""
        with self.lock:
            self.check(bucket, name, query)
            self._generation += 1
            now = time.time()
            old = self.buckets[bucket].get(name)
            stored = Stored(
                name,
                data,
                self._generation,
                old.born if old else self.requests,
                about.get("metadata") or {},
                about.get("contentType") or "application/octet-stream",
                time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now))
                + f".{int(now % 1 * 1e3):03d}Z",
            )
            self.buckets[bucket][name] = stored
            self.writes[name] += 1
            return stored

    def delete(self, bucket: str, name: str, query: dict[str, str]) -> None:
        """Delete an object if the precondition holds."""
        with self.lock:
            found = self.get(bucket, name, query)
            self.check(bucket, name, query)
            del self.buckets[bucket][name]
            self._dead.append((bucket, found, self.requests))

    def list(self, bucket: str, query: dict[str, str]) -> dict[str, Any]:
        """One page of a listing, of the store as it was `faults.stale` requests ago."""
        with self.lock:
            then = self.requests - self.faults.stale
            own = self.requests if self.faults.own_since is None else self.faults.own_since
            shown = [o for o in self.bucket(bucket).values() if o.born <= then or o.born > own]
            if self.faults.stale:
                gone = (o for b, o, died in self._dead if b == bucket and o.born <= then < died)
                names = {o.name for o in shown}
                shown += [o for o in gone if o.name not in names]
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        entries: dict[str, Stored | None] = {}
        for stored in shown:
            name = stored.name
            late = "endOffset" in query and name >= query["endOffset"]
            if not name.startswith(prefix) or name < query.get("startOffset", "") or late:
                continue
            cut = name.find(delimiter, len(prefix)) if delimiter else -1
            key = name if cut < 0 else name[: cut + len(delimiter)]
            entries.setdefault(key, stored if cut < 0 else None)
        keys = sorted(key for key in entries if key > query.get("pageToken", ""))
        limit = min(self.page, int(query.get("maxResults", self.page)))
        page = keys[:limit]
        answer: dict[str, Any] = {"kind": "storage#objects"}
        answer["items"] = [describe(bucket, o) for key in page if (o := entries[key])]
        answer["prefixes"] = [key for key in page if entries[key] is None]
        if len(keys) > limit:
            answer["nextPageToken"] = page[-1]
        return answer

    def begin(self, bucket: str, name: str, query: dict[str, str], about: dict[str, Any]) -> str:
        """Start a resumable upload; returns its URL."""
        with self.lock:
            self.check(bucket, name, query)
            key = f"session{len(self._sessions)}"
            self._sessions[key] = {
                "put": (bucket, name),
                "query": query,
                "about": about,
                "data": b"",
                "done": None,
            }
        match = query.get("ifGenerationMatch")
        tail = f"&ifGenerationMatch={match}" if match is not None else ""
        path = f"/upload/storage/v1/b/{quote(bucket, safe='')}/o"
        name = quote(name, safe="")
        return f"{self.root}{path}?uploadType=resumable&name={name}&upload_id={key}{tail}"

    def extend(self, key: str, range_: str, body: bytes) -> tuple[Stored | None, int]:
        """Take a chunk; returns the object when that was the last, and the bytes held so far."""
        with self.lock:
            session = self._sessions.get(key)
            if session is None:
                raise Refused(404, "no such upload")
            if session["done"] is None:
                span, _, total = range_.removeprefix("bytes ").partition("/")
                held = len(session["data"])
                start = held if span == "*" else int(span.split("-")[0])
                if start > held:
                    raise Refused(400, "a gap in the upload")
                session["data"] += body[held - start :]  # what is held already is ignored
                if total != "*" and len(session["data"]) == int(total):
                    bucket, name = session["put"]
                    session["done"] = self.put(
                        bucket, name, session["data"], session["query"], session["about"]
                    )
            return session["done"], len(session["data"])

    def abandon(self, key: str) -> None:
        """Drop a resumable upload."""
        self._sessions.pop(key, None)
