"""Requests to the test server are named by what they are for."""

from __future__ import annotations

import http.client

from tests.bench.request_servers import kind
from tests.faults.fake_gcs import FakeGCS

OBJECTS = "/storage/v1/b/bucket/o"
UPLOADS = f"/upload{OBJECTS}"

# What each line is counted as, and the status it is answered with.
SENT = [
    ("get bucket", "GET", "/storage/v1/b/bucket", b"", 200),
    ("upload", "POST", f"{UPLOADS}?uploadType=media&name=a%2Fb", b"hello", 200),
    ("upload begin", "POST", f"{UPLOADS}?uploadType=resumable&name=d", b"{}", 200),
    ("get metadata", "GET", f"{OBJECTS}/none", b"", 404),
    ("get object", "GET", f"{OBJECTS}/a%2Fb?alt=media", b"", 200),
    ("get object", "GET", f"/download{OBJECTS}/a%2Fb?alt=media", b"", 200),
    ("list", "GET", f"{OBJECTS}?prefix=a%2F", b"", 200),
    ("copy", "POST", f"{OBJECTS}/a%2Fb/rewriteTo/b/bucket/o/copied", b"", 200),
    ("delete", "DELETE", f"{OBJECTS}/a%2Fb", b"", 204),
]


def test_requests_have_the_kind_of_what_they_are_for():
    """As the server notes them; kinds that the sequence does not have by their URLs."""
    with FakeGCS() as server:
        for _, method, path, body, status in SENT:
            connection = http.client.HTTPConnection(server.root.removeprefix("http://"), timeout=30)
            connection.request(method, path, body)
            assert connection.getresponse().status == status
            connection.close()
        assert [kind(*sent[:3]) for sent in server.log] == [line[0] for line in SENT]
    assert kind("PUT", "/upload/resumable/1", {}) == "upload part"
    assert kind("POST", "/batch/storage/v1", {}) == "batch delete"
    assert kind("PATCH", f"{OBJECTS}/a", {}) == "patch object"
