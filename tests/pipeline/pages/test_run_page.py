"""The page of a run: what it says, and that nothing breaks out of it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from urllib.parse import unquote

import pytest

from pipeline.identity.fingerprint import plain
from pipeline.pages import page as run_page
from pipeline.pages import readable
from pipeline.pages import record as run_record
from pipeline.store import storage
from tests.pipeline.execute import run_logs
from tests.pipeline.execute.run_logs import START, Log, key, node
from tests.pipeline.pages import pages
from tests.pipeline.pages.pages import RUN, Page, boxes_of, overlaps, written


@pytest.fixture
def troubled(tmp_path):
    return pages.troubled(str(tmp_path))


def test_the_header_counts_what_happened(troubled):
    """Command, outcome, wall time, counts, and the time that reuse saved."""
    _, page = troubled
    assert page.wrong == []
    assert page.stack == []
    assert "experiments/run_200m.py --preset smoke" in page.all("h1")[0]["text"]
    assert page.all("span", id="outcome")[0]["text"] == "failed"
    cards = {
        name: page.all("div", id=f"card-{name}")[0]["text"]
        for name in ("wall", "executed", "reused", "failed", "pending", "saved")
    }
    assert cards == {
        "wall": "5 min 58 swall time",
        "executed": "3executed",
        "reused": "3reused",
        "failed": "1failed",
        "pending": "3not finished",
        "saved": "56.5 ssaved by reuse",
    }


def test_failures_and_warnings_come_first(troubled):
    """Cause and log of the failure, the warning's text, both before the graph."""
    path, page = troubled
    items = [e for e in page.all("li") if e.get("class") in ("failed", "warned")]
    assert [e["class"] for e in items] == ["failed", "warned"]
    assert "expected <script>alert('x')</script> & more" in items[0]["text"]
    assert "attempts/000001-aaaa/log.txt" in items[0]["text"]
    assert "3 documents were <empty>" in items[1]["text"]
    text = path.read_text()
    assert text.index("class='problems'") < text.index("<svg")


def test_every_step_has_a_box_and_a_panel_that_its_link_opens(troubled):
    """Ten boxes coloured by state, ten panels, and each box's address is a panel's id."""
    _, page = troubled
    boxes = page.of_class("box")
    assert len(boxes) == len(run_logs.PIPELINE)
    panels = {e["id"] for e in page.all("aside")}
    assert {unquote(e["href"].removeprefix("#")) for e in boxes} == panels
    found = {e["aria-label"].split(":")[0]: e["class"].split()[1] for e in boxes}
    assert found["train_tokenizer"] == "elsewhere"
    assert found["evaluate"] == "failed"
    assert found["train"] == "executed"
    assert found["report"] == "unreached"
    ids = [e["id"] for e in page.elements if "id" in e]
    assert len(ids) == len(set(ids))


def test_the_edges_are_those_of_the_graph(troubled):
    """One edge per input."""
    _, page = troubled
    labels = [label for label, _, _ in run_logs.PIPELINE]
    edges = {
        (labels[int(e["data-from"])], labels[int(e["data-to"])]) for e in page.of_class("edge")
    }
    assert edges == {(i, label) for label, inputs, _ in run_logs.PIPELINE for i in inputs}


def test_a_panel_says_all_that_is_known(troubled):
    """Key, attempts, logs, result, configuration, shards, provenance, lineage, other runs."""
    _, page = troubled
    text = page.panel("train")
    for expected in (
        key("train"),
        node("train")["directory"],
        "000001-aaaa: retried, 1 min 00 s; its worker died: SIGKILL",
        "000002-bbbb: published, 2 min 55 s",
        "1,024",
        "3, 5.1 MB",
        '"learning_rate": 0.003',
        '"name": "fineweb & more"',
        "steps.train, version 3",
        "3.11.9",
        "0123456789ab with uncommitted changes",
        "tokenize_train = tokenize_train executed",
        "evaluate failed",
        "20260922-000000-after reused it",
        "20260920-000000-before executed it",
    ):
        assert expected in text
    assert "gs://team/store" in page.panel("train_tokenizer")
    assert "the run ended before its turn" in page.panel("report")
    assert "10,485,760" in page.panel("documents")
    assert "10,485,760" not in page.panel("report")


def test_pages_of_runs_link_to_each_other(troubled):
    """Previous, next and the table; no link leads to a file that is not there."""
    path, page = troubled
    links = {e["href"] for e in page.all("a") if not e["href"].startswith("#")}
    pages = {link for link in links if link.endswith(".html")}
    assert pages == {"index.html", "20260920-000000-before.html", "20260922-000000-after.html"}
    assert all((path.parent / unquote(link)).exists() for link in pages)
    directories = {link for link in links if link.startswith("../") and link.endswith("/")}
    assert len(directories) == len(run_logs.PIPELINE)


def test_the_table_of_runs(troubled):
    """A row per run, newest first, with outcome and counts."""
    path, _ = troubled
    page = Page((path.parent / "index.html").read_text())
    assert page.wrong == []
    rows = [row["text"] for row in page.all("tr")[1:]]
    assert [re.search(r"smoke([a-z]+)(\d+ ?[\d.]*)", row).group(1) for row in rows] == [
        "finished",
        "failed",
        "finished",
    ]
    assert "331" in rows[1]
    assert [e["href"] for e in page.all("a")] == [
        "20260922-000000-after.html",
        f"{RUN}.html",
        "20260920-000000-before.html",
    ]


NASTY = "</script><img src=x onerror=alert(1)>\"'&\u2028 <!--"


def test_nothing_breaks_out_of_the_page(tmp_path):
    """Markup in every text of the log: the page has the elements it would have without it."""

    def page_for(text):
        prefix = str(tmp_path / str(len(text)))
        entries = [
            {"label": f"a{text}", "key": f"k{text}", "step": text, "directory": "", "inputs": {}},
            {"label": "b", "key": "kb", "step": "s", "inputs": {text: f"k{text}"}},
        ]
        log = Log(prefix, "run").tell(
            "run_started",
            run="run",
            command=[text],
            store=text,
            settings={text: text},
            graph=entries,
        )
        about = {"step": f"a{text}", "key": f"k{text}"}
        log.tell("queued", None, **about).tell("started", None, attempt=text, log=text, **about)
        log.tell("warning", None, message=text, **about)
        log.tell("retried", None, cause=text, tries=1, **about)
        log.tell("started", None, attempt=text, log=text, **about).at(3)
        log.tell("progress", None, done=1, total=2, unit=text, note=text, **about)
        log.tell("failed", None, cause=text, log=text, **about)
        log.tell("hit", None, step="b", key="kb", seconds=1.0, origin=text)
        log.tell("finished", None, step="b", key="kb", seconds=1.0, result={text: [text, {}]})
        log.tell("run_finished", outcome=text, executed=[])
        summaries = run_record.runs(prefix)
        record = run_record.read(prefix, "run")
        return Page(run_page.render(record, {}, summaries)), run_page.render_index(summaries)

    plain, _ = page_for("plain")
    nasty, index = page_for(NASTY)
    assert nasty.wrong == []
    assert [e["tag"] for e in nasty.elements] == [e["tag"] for e in plain.elements]
    assert [sorted(e) for e in nasty.elements] == [sorted(e) for e in plain.elements]
    (data,) = nasty.all("script", id="graph")
    assert json.loads(data["text"])["labels"] == [f"a{NASTY}", "b"]
    assert nasty.all("aside")[0]["id"] == f"step=k{NASTY}"
    assert not {"img"} & {e["tag"] for e in Page(index).elements}


def test_a_log_of_today_without_graph_and_end(tmp_path):
    """No store, no graph, no outcome: a page all the same, and it says that there is no end."""
    log = Log(str(tmp_path), "old").tell("run_started", command=["x.py"], settings={})
    log.tell("hit", "documents", seconds=1.5).tell("queued", "train").began("train").at(3)
    _, page = written(tmp_path, "old")
    assert page.all("span", id="outcome")[0]["text"] == "no end recorded"
    assert "killed or still runs" in page.all("header")[0]["text"]
    assert len(page.of_class("box")) == 2
    Log(str(tmp_path), "empty").tell("run_started")
    _, page = written(tmp_path, "empty")
    assert page.of_class("box") == []


def test_a_damaged_manifest_is_a_warning_on_the_page(tmp_path):
    """The page is written, and names the file."""
    run_logs.clean_run(str(tmp_path), "run", START, reused=10)
    path = tmp_path / node("train")["directory"] / "manifest.json"
    path.write_text("{torn")
    _, page = written(tmp_path, "run")
    (warning,) = page.of_class("warned")
    assert str(path) in warning["text"]


def test_a_later_manifest_of_a_failed_step_is_not_its_result(tmp_path):
    """A step that failed here and was published since says so, and shows no size as its own."""
    run_logs.troubled_run(str(tmp_path))
    run_logs.publish(str(tmp_path), "evaluate", ("train",), 5.0)
    _, page = written(tmp_path)
    assert "by another run" in page.panel("evaluate")
    assert "5.1 MB" not in page.panel("evaluate")


@pytest.mark.parametrize("count", [6, 20, 90, 400])
def test_boxes_do_not_overlap_and_stay_inside(tmp_path, count):
    """In both kinds of drawing."""
    run_logs.large_run(str(tmp_path), "large", count)
    _, page = written(tmp_path, "large")
    boxes = boxes_of(page)
    assert len(boxes) == count
    assert overlaps(boxes) == []
    (svg,) = page.all("svg")
    assert all(x >= 0 and x + w <= float(svg["width"]) for x, _, w, _ in boxes)
    assert all(y >= 0 and y + h <= float(svg["height"]) for _, y, _, h in boxes)
    assert ("many" in svg["class"]) == (count > 60)


def test_the_overlap_check_can_fail():
    assert overlaps([(0, 0, 10, 10), (9, 9, 10, 10)])
    assert not overlaps([(0, 0, 10, 10), (10, 0, 10, 10)])


def test_bars_lie_where_the_times_say(tmp_path):
    """Percentages of the timeline against hand-made times; packed bars of a lane do not overlap."""
    log = Log(str(tmp_path), "run").start([node("documents"), node("train")])
    log.tell("queued", "documents").at(10).began("documents").at(40)
    log.tell("finished", "documents", seconds=40.0, status="published").at(50)
    log.tell("run_finished", outcome="ok", executed=["documents"])
    _, page = written(tmp_path, "run")
    (bar,) = page.of_class("bar")
    assert bar["style"] == "left:10.000%;width:40.000%"
    assert page.of_class("queued")[0]["style"] == "left:0.000%;width:10.000%"
    run_logs.large_run(str(tmp_path), "large", 300)
    text = (written(tmp_path, "large")[0]).read_text()
    lanes = text.split('<div class="row packed">')[1:]
    assert len(lanes) == 12
    for lane in lanes:
        spans = re.findall(r"left:([\d.]+)%;width:([\d.]+)%", lane)
        ends = [float(left) + float(width) for left, width in spans]
        starts = [float(left) for left, _ in spans]
        assert all(s >= e - 0.002 for s, e in zip(starts[1:], ends, strict=False))


def test_readable_numbers():
    """The words for times, sizes and configurations, at the edges of their units."""
    times = (0.004, 0.996, 59.96, 3599.6, 7260, 200_000)
    assert [readable.duration(t) for t in times] == [
        *("0.00 s", "1.0 s", "1 min 00 s", "1 h 00 min", "2 h 01 min", "2 d 7 h"),
    ]
    sizes = (999, 1000, 999_950, 3.4e12)
    assert [readable.size(s) for s in sizes] == ["999 B", "1.0 kB", "1.0 MB", "3.4 TB"]
    tree = {
        "class": "m.C",
        "fields": {
            "rate": {"float": (0.1).hex()},
            "names": {"tuple": ["a", {"enum": "m.Kind", "member": "BIG"}]},
        },
        "defaults": {"weights": {"dict": [["x", {"float": (2.0).hex()}]]}},
    }
    assert plain(tree) == {
        "rate": 0.1,
        "names": ["a", "Kind.BIG"],
        "weights": {"x": 2.0},
    }


@pytest.mark.parametrize(("count", "limit"), [(30, 0.05), (1000, 0.5)])
def test_a_page_is_made_quickly(tmp_path, count, limit):
    """The promise: below 50 ms for 30 steps, 0.5 s for 1,000 (of this process's CPU time)."""
    run_logs.large_run(str(tmp_path), "large", count)
    record = run_record.read(str(tmp_path), "large")
    run_logs.publish(str(tmp_path), "documents", (), 1.0)
    sample = run_page.load(storage.join(str(tmp_path), node("documents")["directory"]))
    manifests = dict.fromkeys(record.steps, sample)
    others = [run_record.summarise(record)] * 20
    took = []
    for _ in range(3):
        clock = time.process_time()
        text = run_page.render(record, manifests, others)
        took.append(time.process_time() - clock)
    assert text.count("<aside") == count
    assert min(took) < limit


def test_making_a_page_imports_nothing_heavy():
    """The standard library, and storage."""
    code = "import pipeline.pages.page, sys; print(*{m.split('.')[0] for m in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "pipeline" in loaded
    assert not loaded & {"jax", "numpy", "ray", "rich", "tyro", "pyarrow", "matplotlib", "haliax"}
