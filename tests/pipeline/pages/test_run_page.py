"""The page of a run: what it says, and that nothing breaks out of it."""

from __future__ import annotations

import subprocess
import sys
import time
from urllib.parse import unquote

import pytest

from pipeline import Experiment
from pipeline.errors import StepFailed
from pipeline.identity.fingerprint import plain
from pipeline.pages import page as run_page
from pipeline.pages import readable
from pipeline.pages import record as run_record
from pipeline.pages.graph import Box, draw
from tests.pipeline.execute import run_logs
from tests.pipeline.execute.run_logs import START, Log, key, node
from tests.pipeline.pages import pages
from tests.pipeline.pages.pages import Page, boxes_of, overlaps, written
from tests.pipeline.toy import clamp, numbers, refuse


@pytest.fixture
def troubled(tmp_path):
    return pages.troubled(str(tmp_path))


def test_the_header_counts_what_happened(troubled):
    """Experiment, command, commit, outcome, wall time, counts, and the time that reuse saved."""
    _, page = troubled
    assert (page.wrong, page.stack) == ([], [])
    assert page.all("title")[0]["text"] == "run_200m · 20260921-120000-aaaaaa"
    header = page.all("header")[0]["text"]
    for expected in ("experiments/run_200m.py --preset smoke", "failed", "commit 0123456789ab"):
        assert expected in header
    (summary,) = page.of_class("cards")
    assert summary["text"].split("\n")[1:-1] == [
        "5 min 58 swall time",
        "3executed",
        "3reused",
        "1failed",
        "3not finished",
        "56.5 ssaved by reuse",
    ]


def test_failures_and_warnings_come_first(troubled):
    """Cause and log of the failure, the warning's text, both before the graph."""
    path, page = troubled
    failed, warned = page.all("li")
    assert "expected <script>alert('x')</script> & more" in failed["text"]
    assert "3 documents were <empty>" in warned["text"]
    text = path.read_text()
    assert text.index('class="problems"') < text.index("<svg")


def test_a_failure_is_one_box_with_its_retry_on_a_line_of_its_own(tmp_path):
    """The end of the run repeats nothing of it; an executed step is not "not built yet"."""

    def mine(fails: bool = False):
        return refuse(clamp(numbers(count=4), limit=2)) if fails else numbers(count=4)

    prefix = str(tmp_path)
    with pytest.raises(StepFailed):
        Experiment(mine).run(prefix=prefix, fails=True, executor="inline")
    (record,) = run_record.runs(prefix)
    path, page = written(prefix, record.run)
    assert page.wrong == []
    (problem,) = page.all("li")
    first, second = [line for line in problem["text"].splitlines() if line.strip()]
    assert first.endswith("refuse expected something else than 4 numbers log")
    assert second.startswith("retry: mine.run(")
    text = page.all("main")[0]["text"]
    assert text.count("had not been built before") == 4  # two steps: beside the name, and inside
    assert f"mine.run(prefix={prefix!r}, fails=True" in text
    assert text.count("not built yet") == 1  # of the step that failed
    index = Page((path.parent / "index.html").read_text())
    assert index.all("code")[0]["text"].startswith("mine.run(prefix=")


def test_the_cause_of_a_run_that_never_began_is_on_its_page(tmp_path):
    """Ray did not start: the run failed, no step did, and the page does not call it up to date."""
    log = Log(str(tmp_path), "crashed").start(run_logs.graph()).at(44)
    log.tell("run_finished", outcome="failed", executed=[], cause="Ray did not start: timed out")
    _, page = written(tmp_path, "crashed")
    (problem,) = page.all("li")
    assert "Ray did not start: timed out" in problem["text"]
    text = page.all("main")[0]["text"]
    assert "nothing was built" not in text
    assert "not needed" not in text


def test_a_run_that_reused_everything_says_so(tmp_path):
    """Unlike a crashed one."""
    run_logs.clean_run(str(tmp_path), "same", START, reused=10)
    _, page = written(tmp_path, "same")
    assert "nothing was built" in page.all("main")[0]["text"]
    assert page.all("li") == []


def test_a_run_without_an_end_was_killed_or_still_runs(tmp_path):
    """By how long ago its last event was; a log without a graph or a store will do."""
    for run, start, expected in (
        ("old", time.time() - 90_000, "killed (no exit record)"),
        ("new", time.time(), "running"),
    ):
        log = Log(str(tmp_path), run, start).tell("run_started", command=["x.py"], settings={})
        log.tell("hit", "documents", seconds=1.5).tell("queued", "train").began("train")
        _, page = written(tmp_path, run)
        assert expected in page.all("h1")[0]["text"]
        assert len(page.of_class("box")) == 2
    Log(str(tmp_path), "empty").tell("run_started")
    _, page = written(tmp_path, "empty")
    assert page.of_class("box") == []


def test_every_step_has_a_box_whose_link_opens_its_details(troubled):
    """Ten boxes coloured by state, in ten details elements, and an edge per input."""
    _, page = troubled
    boxes = page.of_class("box")
    assert len(boxes) == len(run_logs.PIPELINE)
    details = {e["id"] for e in page.all("div") if "id" in e}
    assert {unquote(e["href"].removeprefix("#")) for e in boxes} == details
    states = {e["href"].removeprefix("#"): e["class"].split()[1] for e in boxes}
    assert states[key("train_tokenizer")] == "elsewhere"
    assert states[key("evaluate")] == "failed"
    assert states[key("report")] == "unreached"
    assert len(page.of_class("edge")) == sum(len(inputs) for _, inputs, _ in run_logs.PIPELINE)


def test_the_details_of_a_step_say_all_that_is_known(troubled):
    """Key, attempts, result, configuration, shards, provenance and lineage."""
    _, page = troubled
    text = page.panel("train")
    for expected in (
        key("train"),
        node("train")["directory"],
        "000001-aaaa retried, 1 min 00 s; its worker died: SIGKILL log",
        "000002-bbbb published, 2 min 55 s",
        "1,024",
        "3, 5.1 MB",
        "learning_rate0.003",
        "source.namefineweb & more",
        "steps.train, version 3",
        "3.11.9",
        "0123456789abcdef",
        "input tokenize_traintokenize_train",
        "used byevaluate, sample",
    ):
        assert expected in text
    assert "gs://team/store" in page.panel("train_tokenizer")
    assert "10,485,760" in page.panel("documents")
    times = "Where the time went data wait1 min 15 s total4 min 00 s Measured hardwareh100"
    assert times in page.panel("documents")
    assert "measured." not in page.panel("documents")
    assert "10,485,760" not in page.panel("report")
    summaries = [e["text"] for e in page.all("summary")]
    assert any("the run ended before it could start" in text for text in summaries)


def test_links_stay_in_the_store(troubled):
    """Previous, next and the table exist, and nothing names the place where the store lies."""
    path, page = troubled
    links = {e["href"] for e in page.all("a") if not e["href"].startswith("#")}
    found = {link for link in links if link.endswith(".html")}
    assert found == {"index.html", "20260920-000000-before.html", "20260922-000000-after.html"}
    assert all((path.parent / link).exists() for link in found)
    rest = links - found
    assert all(link.startswith("../") for link in rest)
    assert f"../{node('train')['directory']}/" in rest
    assert f"../{node('evaluate')['directory']}/attempts/000001-aaaa/log.txt" in rest


def test_a_page_among_the_files_of_an_output_is_linked(tmp_path):
    """From the run's page to the report that it made, also in the panel of what it is about."""
    run_logs.clean_run(str(tmp_path), "run", START, reused=10)
    path = tmp_path / node("report")["directory"] / "manifest.json"
    path.write_text(path.read_text().replace('"path": "x"', '"path": "index.html"'))
    _, page = written(tmp_path, "run")
    links = [e["href"] for e in page.all("a") if e["text"] == "index.html"]
    assert links[0] == f"../{node('report')['directory']}/attempts/a/shards/part/0/index.html"
    assert [e["href"] for e in page.all("a") if e["text"] == "report"].count(links[0]) == 4
    assert "pagereport" in page.panel("train")
    assert "pagereport" not in page.panel("documents")


def test_the_table_of_runs(troubled):
    """A row per run, newest first, with outcome and counts."""
    path, _ = troubled
    page = Page((path.parent / "index.html").read_text())
    assert page.wrong == []
    rows = [row["text"].split("\n") for row in page.all("tr")[1:]]
    assert [row[0].split("UTC")[1] for row in rows] == [
        f"{outcome}run_200m" for outcome in ("finished", "failed", "finished")
    ]
    assert rows[1][1].startswith("3315 min 58 s")
    assert [e["href"][:8] for e in page.all("a")] == ["20260922", "20260921", "20260920"]


def test_the_table_of_runs_has_the_headline_of_the_last_step_that_has_one(tmp_path):
    """As far as the run's own log says it."""
    log = run_logs.clean_run(str(tmp_path), "20260920-000000-run", START, reused=9)
    log.tell("finished", "train", result={"headline": ["loss 3.22", "over 8 steps"]})
    run_logs.clean_run(str(tmp_path), "20260921-000000-same", START + 9000, reused=10)
    page = Page(run_page.render_index(run_record.runs(str(tmp_path))))
    results = [e for e in page.elements if e["tag"] in ("th", "td")][7::9]
    assert [cell["text"] for cell in results] == ["result", "", "loss 3.22"]


def test_a_run_without_a_page_is_passed_over(tmp_path):
    """It built nothing: previous and next lead past it."""
    for day, name in enumerate(("first", "same", "last")):
        run_logs.clean_run(str(tmp_path), name, START + 9000 * day, reused=9)
        if name != "same":
            last = written(tmp_path, name)[1]
    first = Page((tmp_path / "reports" / "first.html").read_text())
    assert first.all("nav")[0]["text"].split("All runs")[1].strip() == "next last →"
    assert last.all("nav")[0]["text"].split("All runs")[1].strip() == "← previous first"


NASTY = "</script></style><img src=x onerror=alert(1)>\"'&\u2028 <!--"


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
        log.tell("queued", None, reason=text, **about)
        log.tell("started", None, attempt=text, log=text, **about)
        log.tell("warning", None, message=text, **about)
        log.tell("retried", None, cause=text, tries=1, **about)
        log.tell("started", None, attempt=text, log=text, **about).at(3)
        log.tell("progress", None, done=1, total=2, unit=text, note=text, **about)
        log.tell("failed", None, cause=text, log=text, **about)
        log.tell("hit", None, step="b", key="kb", seconds=1.0, origin=text)
        log.tell("finished", None, step="b", key="kb", seconds=1.0, result={text: [text, {}]})
        log.tell("run_finished", outcome=text, cause=text, executed=[])
        found = run_record.runs(prefix)
        record = run_record.read(prefix, "run")
        return Page(run_page.render(record, {}, text, text)), Page(run_page.render_index(found))

    plain = "plain" + " words" * NASTY.count(" ")  # each word of a command is an element
    for harmless, nasty in zip(page_for(plain), page_for(NASTY), strict=True):
        assert nasty.wrong == []
        assert [e["tag"] for e in nasty.elements] == [e["tag"] for e in harmless.elements]
        assert [sorted(e) for e in nasty.elements] == [sorted(e) for e in harmless.elements]


def test_a_corrupt_manifest_is_a_warning_on_the_page(tmp_path):
    """The page is written, and names the file."""
    run_logs.clean_run(str(tmp_path), "run", START, reused=10)
    path = tmp_path / node("train")["directory"] / "manifest.json"
    path.write_text("{torn")
    _, page = written(tmp_path, "run")
    (warning,) = page.all("li")
    assert str(path) in warning["text"]


def test_a_later_manifest_of_a_failed_step_is_not_its_result(tmp_path):
    """A step that failed here and was published since says so, and shows no size as its own."""
    run_logs.troubled_run(str(tmp_path))
    run_logs.publish(str(tmp_path), "evaluate", ("train",), 5.0)
    _, page = written(tmp_path)
    assert "by another run" in page.panel("evaluate")
    assert "5.1 MB" not in page.panel("evaluate")


@pytest.mark.parametrize("count", [20, 60, 61])
def test_boxes_do_not_overlap_and_stay_inside(tmp_path, count):
    """Up to sixty steps; more are a list alone."""
    run_logs.large_run(str(tmp_path), "large", count)
    _, page = written(tmp_path, "large")
    assert len(page.of_class("step")) == count
    if count > 60:
        assert page.all("svg") == []
        return
    boxes = boxes_of(page)
    assert len(boxes) == count
    assert overlaps(boxes) == []
    (svg,) = page.all("svg")
    assert all(x >= 0 and x + w <= float(svg["width"]) for x, _, w, _ in boxes)
    assert all(y >= 0 and y + h <= float(svg["height"]) for _, y, _, h in boxes)


@pytest.mark.slow
def test_every_text_fits_in_its_box(troubled, tmp_path):
    """Long notes below names and names above short notes, in a wide font, DejaVu Sans."""
    Log(str(tmp_path), "begun").start(run_logs.graph())
    for page in (troubled[1], written(tmp_path, "begun")[1]):
        names, notes = (page.of_class(kind) for kind in ("name", "small"))
        for box, name, note in zip(boxes_of(page), names, notes, strict=True):
            assert pages.right_end(name, 13, "bold") <= box[2], name["text"]
            assert pages.right_end(note, 12, "normal") <= box[2], note["text"]


def test_inputs_lie_above_what_is_made_from_them():
    """A step stands in the layer behind its deepest input, and long edges go around boxes."""
    boxes = [Box("a", "a"), Box("b", "b", parents=["a"]), Box("c", "c", parents=["a", "b", "gone"])]
    drawing = draw(boxes)
    assert drawing is not None
    tops = [y for _, _, y in drawing.boxes]
    assert tops == sorted(set(tops))
    assert len(drawing.edges) == 3
    assert draw([]) is None


def test_bars_lie_where_the_times_say(tmp_path):
    """Percentages of the timeline against hand-made times."""
    log = Log(str(tmp_path), "run").start([node("documents"), node("train")])
    log.tell("queued", "documents").at(10).began("documents").at(40)
    log.tell("finished", "documents", seconds=40.0, status="published").at(50)
    log.tell("run_finished", outcome="ok", executed=["documents"])
    _, page = written(tmp_path, "run")
    queued, bar = page.of_class("bar")
    assert queued["style"] == "left:0.000%;width:10.000%"
    assert bar["style"] == "left:10.000%;width:40.000%"


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
    values = {"rate": 0.1, "names": ["a", "Kind.BIG"], "weights": {"x": 2.0}}
    assert plain(tree) == values
    assert readable.flat(values) == {"rate": 0.1, "names": ["a", "Kind.BIG"], "weights.x": 2.0}
    numbers = (True, 1234567, 1 / 3, float("nan"), [1, 2], [[1], 2], None)
    assert [readable.number(n) for n in numbers] == [
        *("True", "1,234,567", "0.333333", "nan", "1, 2", "2 values", "None")
    ]


def test_making_a_page_imports_nothing_heavy():
    """The standard library, the templates' library, and storage."""
    code = "import pipeline.pages.page, sys; print(*{m.split('.')[0] for m in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "pipeline" in loaded
    assert not loaded & {"jax", "numpy", "ray", "rich", "tyro", "pyarrow", "matplotlib", "haliax"}
