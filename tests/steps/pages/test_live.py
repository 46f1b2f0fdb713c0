"""The dashboard: what it answers, what it refuses, and how often it asks the store."""

from __future__ import annotations

import contextlib
import http.client
import importlib
import json
import os
import threading
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from pipeline.errors import InputError
from pipeline.execute.spending import ledger
from pipeline.pages import page as run_page
from pipeline.pages.record import runs
from pipeline.store import run_summary, storage
from steps.cli.dashboard import serve
from steps.pages import live
from steps.pages.live import LivePages
from tests.bench import dashboard as bench
from tests.bench.request_servers import kind
from tests.faults.fake_gcs import FakeGCS
from tests.pipeline.execute import run_logs
from tests.pipeline.execute.run_logs import START
from tests.pipeline.pages.pages import RUN, Page
from tests.steps.pages.test_compare_command import attempt, began, steps

compare = importlib.import_module("steps.pages.compare")  # of the package, the name is the step's
TRAIN = f"train-{run_logs.key('train')[:20]}"
OTHER = "train-" + "0123456789abcdef0123"


@contextlib.contextmanager
def serving(prefix, host="127.0.0.1") -> Iterator:
    server = serve(str(prefix), host)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def ask(server, path, method="GET", **headers):
    """(status, headers, text) of one request, sent as it is."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=30)
    connection.putrequest(method, path, skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders()
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, dict(answer.getheaders()), text


def training(prefix, name=TRAIN, count=5, loss=1.0):
    """A training in progress in the store."""
    rows = [began(0), *steps(*range(1, count + 1), loss=loss)]
    attempt(prefix / name, "000001-aaaa", rows)


def append(prefix):
    """The sixth step of a training."""
    row = {"kind": "step", "step": 6, "loss": 0.25, "tokens": 10, "time": 0}
    with open(prefix / TRAIN / "attempts/000001-aaaa/keep/metrics.jsonl", "a") as file:
        file.write(json.dumps(row) + "\n")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A store with two runs, two trainings in progress, a report, and what must not be shown."""
    prefix = tmp_path_factory.mktemp("store")
    run_logs.clean_run(str(prefix), "20260920-000000-before", START - 9000, reused=0)
    log = run_logs.Log(str(prefix), RUN).start(run_logs.graph())
    log.tell("queued", "train").began("train").at(9)
    log.tell("progress", "train", done=5, total=9, unit="steps", note="loss 4.1")
    os.unlink(prefix / TRAIN / "manifest.json")
    training(prefix)
    training(prefix, OTHER, count=8, loss=2.0)
    (prefix / "reports/run_200m").mkdir(parents=True)
    (prefix / "reports/run_200m/report.html").write_text("<!doctype html><title>a report</title>")
    (prefix / "launch/run").mkdir(parents=True)
    (prefix / "launch/run/secret.txt").write_text("the cluster's secret")
    (prefix / TRAIN / "weights.bin").write_bytes(b"0")
    (prefix.parent / "outside.txt").write_text("outside of the store")
    os.symlink(prefix.parent / "outside.txt", prefix / TRAIN / "link.txt")
    return prefix


@pytest.fixture(scope="module")
def server(store):
    with serving(store) as running:
        yield running


def test_its_pages_are_those_that_runs_write(store, tmp_path):
    """The index and a run, but for the links to its neighbours and to what is alive."""
    pages = LivePages(str(store))
    index = pages("reports/index.html", {}).body.decode()
    assert [each["text"] for each in Page(index).of_class("pill")][1] == "finished"
    run_page.write(str(store), "20260920-000000-before")
    written = (store / "reports/20260920-000000-before.html").read_text()
    live = pages("reports/20260920-000000-before.html", {}).body.decode()

    def without(text):
        text = text.replace(f'<a href="../{TRAIN}/">curves</a> ', "")
        return text.partition("<nav")[0] + text.partition("</nav>")[2]

    assert without(live) == without(written)


def test_a_run_in_progress_is_shown_as_far_as_it_is(server, store, monkeypatch):
    """Its state and progress in the index; its page leads to its curves, and grows."""
    monkeypatch.setattr(live, "_SHARE", 0)
    os.utime(store / "events" / f"{RUN}.jsonl")
    index = Page(ask(server, "/reports/index.html")[2])
    assert "2 runs" in index.all("p")[0]["text"]
    page = ask(server, f"/reports/{RUN}.html")[2]
    assert Page(page).all("a", href=f"../{TRAIN}/")
    status, headers, curves = ask(server, f"/{TRAIN}/")
    assert (status, Page(curves).wrong) == (200, [])
    assert "<svg" in curves
    assert ask(server, f"/{TRAIN}/", If_None_Match=headers["ETag"])[::2] == (304, "")
    append(store)
    status, changed, curves = ask(server, f"/{TRAIN}/", If_None_Match=headers["ETag"])
    assert status == 200
    assert changed["ETag"] != headers["ETag"]
    assert "0.25" in curves


def test_a_page_that_takes_long_is_made_seldom(tmp_path, monkeypatch):
    """A tenth of the time at most; then it has what came since."""
    training(tmp_path)
    clock = [0.0]
    monkeypatch.setattr(live.time, "monotonic", lambda: clock[0])
    pages = LivePages(str(tmp_path))
    monkeypatch.setattr(compare, "render", slow(compare.render, clock, 2.0))
    first = pages(f"{TRAIN}/", {}).body
    append(tmp_path)
    clock[0] += 17
    assert pages(f"{TRAIN}/", {}).body == first
    clock[0] += 4
    assert pages(f"{TRAIN}/", {}).body != first


def slow(function, clock, seconds):
    def call(*arguments):
        clock[0] += seconds
        return function(*arguments)

    return call


def test_runs_are_compared_on_the_page_of_the_verb(server):
    """Both curves; something else than the store's outputs is refused by name."""
    text = ask(server, f"/compare.html?run={TRAIN}&run={OTHER}")[2]
    assert "2 runs compared" in text
    for wrong in ("/etc", "gs://bucket/x", "../train-0123456789abcdef0123", "train/../x"):
        status, _, text = ask(server, f"/compare.html?run={wrong}")
        assert (status, "expected 1 to" in text, wrong in text) == (404, True, True)


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/", 302),
        ("/reports/run_200m/report.html", 200),
        (f"/{TRAIN}/attempts/000001-aaaa/keep/metrics.jsonl", 200),
        (f"/{TRAIN}/attempts/", 200),
        ("/launch/run/secret.txt", 404),
        (f"/{TRAIN}/weights.bin", 404),
        (f"/{TRAIN}/link.txt", 404),
        (f"/{TRAIN}/../launch/run/secret.txt", 404),
        (f"/{TRAIN}/%2e%2e/launch/run/secret.txt", 404),
        (f"/{TRAIN}/..%2f..%2foutside.txt", 404),
        ("/reports/..%2flaunch/run/secret.txt", 404),
        ("//etc/passwd", 404),
        ("/%00", 404),
        ("/%ff%fe", 404),
        (f"/events/{RUN}.jsonl", 404),
        ("/reports/index.html?page=0", 404),
        ("/reports/index.html?page=x", 404),
        ("/reports/nothing.html", 404),
    ],
)
def test_only_reports_and_outputs_of_the_store_are_shown(server, path, status):
    """Nothing beside the store, nothing of other kinds, and no cluster's secret."""
    found, headers, text = ask(server, path)
    assert found == status, text
    assert "secret" not in text.replace("secret.txt", "")
    assert "outside of" not in text
    assert headers["X-Content-Type-Options"] == "nosniff"


def test_a_page_from_the_store_has_an_origin_of_its_own(server):
    """Its scripts reach no other page; ours allow the package's scripts and no others."""
    stored = ask(server, "/reports/run_200m/report.html")[1]["Content-Security-Policy"]
    assert "sandbox allow-scripts;" in stored
    assert "connect-src" not in stored
    ours = ask(server, "/reports/index.html")[1]["Content-Security-Policy"]
    (scripts,) = (part for part in ours.split("; ") if part.startswith("script-src"))
    assert scripts.count("'sha256-") == 2
    assert "unsafe" not in scripts
    for policy in (stored, ours):
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_nothing_can_be_changed(server, method):
    """Every other method is refused."""
    assert ask(server, "/reports/index.html", method)[0] in (405, 501)


def test_what_was_spent_is_a_page_that_the_index_links(server, store):
    """The same hours as the verb counts."""
    _, _, index = ask(server, "/reports/index.html")
    status, _, text = ask(server, "/spending.html")
    assert status == 200
    assert 'href="/spending.html"' in index
    for each in ledger(runs(str(store), 10)):
        assert f"{each['experiment']}: {each['hours']:.3f} h" in text


def test_a_head_has_the_headers_alone(server):
    """As those of a GET."""
    status, headers, text = ask(server, "/reports/run_200m/report.html", "HEAD")
    assert (status, text) == (200, "")
    assert int(headers["Content-Length"]) > 0


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:7878", 200),
        ("localhost", 200),
        ("[::1]:80", 200),
        ("[::1", 421),
        ("evil.example:", 421),
        ("[evil.example]", 421),
        ("evil.example", 421),
        ("evil.example:7878", 421),
        ("localhost.evil.example", 421),
        ("127.0.0.1.evil.example", 421),
        ("", 421),
    ],
)
def test_a_name_that_leads_here_is_refused(server, host, status):
    """Another site's name may resolve to this machine; an address may not lie."""
    assert ask(server, "/reports/run_200m/report.html", Host=host)[0] == status


def test_elsewhere_it_needs_the_token(store):
    """From the link once, then from a cookie; a link may not lead to another server."""
    with serving(store, "0.0.0.0") as server:
        assert server.url.endswith(f"/?token={server.token}")
        assert len(server.token) >= 32
        path = "/reports/run_200m/report.html"
        assert ask(server, path)[0] == 403
        assert ask(server, f"{path}?token=wrong")[0] == 403
        assert ask(server, path, Cookie="ponente-1=x; no cookie at all; =;")[0] == 403
        status, headers, _ = ask(server, f"{path}?token={server.token}")
        assert (status, headers["Location"]) == (303, path)
        cookie = headers["Set-Cookie"]
        assert "HttpOnly" in cookie
        assert ask(server, path, Cookie=cookie.partition(";")[0])[0] == 200
        location = ask(server, f"//evil.example/?token={server.token}")[1]["Location"]
        assert urlsplit(location).netloc == ""


def test_what_is_no_store_and_a_port_in_use_are_refused(tmp_path, store, server):
    """Each with what to do."""
    with pytest.raises(InputError, match="expected a store with runs, found nothing in"):
        serve(str(tmp_path / "none"))
    with pytest.raises(InputError, match="--port 0 for a free one"):
        serve(str(store), port=server.server_address[1])
    with pytest.raises(InputError, match=r"cannot listen on 127\.0\.0\.1:70000 .*0-65535"):
        serve(str(store), port=70_000)


def test_a_page_that_fails_ends_no_other(server, store):
    """A damaged log is one line with status 500 or 503."""
    place = store / "train-aaaaaaaaaaaaaaaaaaaa/attempts/000001-aaaa/keep"
    place.mkdir(parents=True)
    (place / "metrics.jsonl").write_text("[]\nnot json\n")
    status, _, text = ask(server, "/train-aaaaaaaaaaaaaaaaaaaa/")
    assert status >= 500
    assert text.count("\n") == 1
    assert ask(server, "/reports/index.html")[0] == 200


@pytest.fixture
def bucket(tmp_path) -> Iterator[tuple[FakeGCS, list[str]]]:
    """A bucket with more runs than one page of the index, `bench.LIVE` of them in progress."""
    with FakeGCS() as server:
        yield server, bench.fill(130, tmp_path)


def test_what_a_bucket_holds_is_answered_whole():
    """A report and a table of an output, each one object."""
    pages, output = LivePages("memory://live"), f"train-{'0' * 20}"
    for path in ("reports/mine/report.html", f"{output}/attempts/1/history.csv"):
        storage.write_atomic(f"memory://live/{path}", b"all of it")
        found = pages(path, {})
        assert found is not None
        assert found.body == b"all of it"


def test_a_refresh_reads_what_has_changed_and_writes_nothing(bucket, monkeypatch):
    """One listing and one for each run in progress; of a log that has grown its new part."""
    server, runs = bucket
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda real=time.monotonic: real() + clock[0])
    pages = LivePages(bench.PREFIX)

    def asked(path, query=()):
        before = len(server.log)
        assert pages(path, dict(query)).body
        kinds = [kind(*each[:3]) for each in server.log[before:]]
        assert {*kinds} <= {"list", "get object", "get metadata"}
        return {name: kinds.count(name) for name in kinds}

    index = "reports/index.html"
    live = bench.LIVE
    assert asked(index) == {"list": 1 + live, "get object": 100}
    assert asked(index) == {}
    clock[0] += 10
    assert asked(index) == {"list": 1 + live}
    bench.grow(runs[-1], 2)
    clock[0] += 10
    assert asked(index) == {"list": 1 + live, "get object": 1}
    assert asked(index, {"page": ["2"]}.items()) == {"get object": 30}
    # A run that ended elsewhere: its summary is newer.
    url = run_summary.summary_url(bench.PREFIX, runs[3])
    storage.write_atomic(url, storage.read_bytes(url))
    clock[0] += 10
    assert asked(index, {"page": ["2"]}.items()) == {"list": 1}
