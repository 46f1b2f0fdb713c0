"""What a request to the project's gs:// server is for."""

from __future__ import annotations

from collections.abc import Mapping

from tests.faults.fake_gcs import BUCKET, COPY, LISTING, OBJECT


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
