"""The bench of requests counts what was sent, and says so in lines that have every field."""

from __future__ import annotations

import http.client
import json

import pytest

from tests.bench import request_counts
from tests.bench.engine_process import Ended
from tests.bench.request_counts import Bench, counted
from tests.bench.request_servers import Disk, kind
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


def test_requests_are_counted_by_kind_and_refusal():
    """Each once, under what it is for; kinds that the sequence does not have by their URLs."""
    with FakeGCS() as server:
        for _, method, path, body, status in SENT:
            root = server.root.removeprefix("http://")
            connection = http.client.HTTPConnection(root, timeout=30)
            connection.request(method, path, body)
            assert connection.getresponse().status == status
            connection.close()
        names = [line[0] for line in SENT]
        assert counted(server.log) == {
            "requests": len(SENT),
            "kinds": {name: names.count(name) for name in names},
            "refused": {"404": 1},
        }
    assert kind("PUT", "/upload/resumable/1", {}) == "upload part"
    assert kind("POST", "/batch/storage/v1", {}) == "batch delete"
    assert kind("PATCH", f"{OBJECTS}/a", {}) == "patch object"


class Scripted(Bench):
    """A bench whose processes are lines of a list: seconds, or None for one that was ended."""

    script: list[float | None]
    ran: list[tuple[str, str]]

    def _run(self, verb, name, limit):
        self.ran.append((verb, name))
        self._place.log.append(("GET", OBJECTS, {}, 200))
        seconds = self.script.pop(0)
        return None if seconds is None else Ended(0, seconds, 0.0, 0.0, 0.1, [])


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """Nothing is under way when a scripted process ends."""
    monkeypatch.setattr(request_counts, "_SETTLE_SECONDS", 0.0)
    made = Scripted(Disk(tmp_path), "steps", 1, 9.0, tmp_path)
    made.ran = []
    return made


def test_delays_one_after_another_are_what_the_first_latency_does_not_explain(bench):
    """Ten delays of 50 ms are half a second; every verb looks at the first store finished."""
    bench.script = [1.0] * 5 + [1.5, 1.0, 1.1, 2.0, 0.9]
    rows = list(bench.rows([0.0, 50.0]))
    assert [row.get("in_a_row") for row in rows] == [None] * 5 + [10, 0, 2, 20, 0]
    assert {name for verb, name in bench.ran if verb != "cold"} == {"store-0"}


def test_a_cold_run_that_takes_too_long_is_done_again_for_the_others(bench):
    """Its line has its requests and the limit; what fills the store has no line."""
    bench.script = [None, 5.0, 1.0, 1.0, 1.0, 1.0]
    rows = list(bench.rows([50.0]))
    assert [row["timed_out"] for row in rows] == [True, False, False, False, False]
    assert (rows[0]["wall_s"], rows[0]["requests"]) == (9.0, 1)
    assert bench.ran[:3] == [("cold", "store-50"), ("cold", "store"), ("plan", "store")]


@pytest.mark.slow
def test_every_line_is_a_measurement(monkeypatch, capsys, tmp_path):
    """Two verbs at two places: requests where there is a server, each in the log."""
    monkeypatch.setattr(request_counts, "VERBS", {"cold": "run", "noop": "run"})
    log = tmp_path / "log.jsonl"
    assert request_counts.main(["--graphs", "shards", "--shards", "2", "--log", str(log)]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()][1:]
    assert [(row["store"], row["verb"]) for row in rows] == [
        (place, verb) for place in ("own", "local") for verb in ("cold", "noop")
    ]
    assert [row["requests"] > 0 for row in rows] == [True, True, False, False]
    assert len(log.read_text().splitlines()) == sum(row["requests"] for row in rows)
