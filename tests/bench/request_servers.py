"""Where the requests of a bench go, and what each is for: the project's gs:// server, or a disk."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Self

from tests.faults.fake_gcs import BUCKET, COPY, LISTING, OBJECT, FakeGCS, Faults

Noted = tuple[str, str, dict[str, str], int]  # method, path, query, status
_BUCKET = "bucket"


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


class Disk:
    """A store on the local disk: no requests, and no latency to set."""

    name = "local"

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self.log: list[Noted] = []

    def url(self, name: str) -> str:
        return str(self._scratch / name)

    def environment(self) -> dict[str, str]:
        return {}

    def delay(self, seconds: float) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass


class Own(Disk):
    """The project's test server, in this process; `delay` lets every answer come so much later."""

    name = "own"

    def __init__(self, scratch: Path) -> None:
        super().__init__(scratch)
        self._server = FakeGCS(buckets=(_BUCKET,))
        self.log = self._server.log

    def url(self, name: str) -> str:
        return f"gs://{_BUCKET}/{name}"

    def environment(self) -> dict[str, str]:
        return self._server.environment()

    def delay(self, seconds: float) -> None:
        self._server.faults = Faults(latency_seconds=seconds)

    def __enter__(self) -> Self:
        self._server.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.__exit__(*error)


PLACES: dict[str, type[Disk]] = {place.name: place for place in (Own, Disk)}
