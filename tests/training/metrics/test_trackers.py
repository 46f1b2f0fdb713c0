"""No tracker can hold up or end a run, whatever it does; what it shows is what the file has."""

import json
import shutil
import subprocess
import sys
import time

import pytest

from pipeline.errors import InputError, StoreUnavailable
from pipeline.store import storage
from training.metrics import trackers
from training.metrics.trackers import Spool, Trackers, follow

CHILD = """
import json, sys
from training.metrics import trackers

def library(context, entries):
    with open(context["directory"] + "/child", "w", buffering=1) as file:
        print(context["config"]["title"], file=file)
        for entry in entries:
            print(entry["step"], file=file)
            if entry.get("loss") == "bad":
                sys.exit("bad loss, said the library")
        file.write("done")

trackers.BACKENDS.update(wandb=library, trackio=library)
trackers.LOOK_SECONDS = 0.01
trackers.main()
"""
HANGS = "import time; time.sleep(1000)"


@pytest.fixture
def entries(tmp_path):
    """The file that a run writes."""
    return (tmp_path / "metrics.jsonl").open("ab", buffering=0)


def write(file, *entries):
    for entry in entries:
        file.write(json.dumps(entry).encode() + b"\n")


def started(tmp_path, *codes):
    names = ("wandb", "trackio", "tensorboard")[: len(codes)]
    context = {
        "path": str(tmp_path / "metrics.jsonl"),
        "directory": str(tmp_path),
        "run": "run",
        "build": "",
        "config": {"title": "a run"},
    }
    found = Trackers((), context)
    for name, code in zip(names, codes, strict=True):
        found._children[name] = found._start(name, context, (sys.executable, "-c", code))
    return found


def until(found):
    """What the trackers report when one has ended."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if failures := found.failures():
            return failures
        time.sleep(0.01)
    raise AssertionError("no tracker ended")


def test_a_child_shows_all_that_the_file_has_and_finishes(tmp_path, entries):
    """Also what was written before it began, and at the very end."""
    write(entries, {"step": 1})
    found = started(tmp_path, CHILD)
    write(entries, *({"step": step} for step in range(2, 1000)))
    assert found.close(20) == []
    shown = (tmp_path / "child").read_text().split("\n")
    assert shown == ["a run", *map(str, range(1, 1000)), "done"]


def test_a_child_that_dies_says_why_once(tmp_path, entries):
    """Its last words, while the run goes on and not again at its end."""
    found = started(tmp_path, CHILD)
    write(entries, {"step": 1, "loss": "bad"})
    line = "tracker wandb is off, the run continues without it: bad loss, said the library"
    assert until(found) == [line]
    write(entries, {"step": 2})
    assert found.failures() == found.close(5) == []


def test_a_child_that_fails_at_the_end_is_reported(tmp_path, entries):
    """By `close`, which waits for it."""
    found = started(tmp_path, "import sys; sys.stdin.readline(); sys.stdin.read(); sys.exit(3)")
    assert found.failures() == []
    (line,) = found.close(20)
    assert line.endswith("its process ended with status 3")


def test_a_child_that_takes_no_context_is_reported(tmp_path, monkeypatch):
    """It has ended when the run writes to it, and what it did not take is no error of the run."""
    start = subprocess.Popen

    def start_late(*arguments, **options):
        child = start(*arguments, **options)
        child.wait(20)
        return child

    monkeypatch.setattr(subprocess, "Popen", start_late)
    (line,) = started(tmp_path, "raise SystemExit(4)").close(20)
    assert line.endswith("its process ended with status 4")


@pytest.mark.slow
def test_a_child_that_hangs_is_killed_and_holds_up_no_other(tmp_path, entries, caplog):
    """It never reads; closing ends in time, and the other one has everything."""
    found = started(tmp_path, HANGS, CHILD)
    write(entries, *({"step": step, "text": "x" * 100} for step in range(5000)))
    while not (tmp_path / "child").exists():
        time.sleep(0.01)
    began = time.monotonic()
    found.close(3)
    assert time.monotonic() - began < 15
    assert found._children["wandb"].returncode != 0
    assert "tracker wandb: not done in time" in caplog.text
    assert (tmp_path / "child").read_text().endswith("4999\ndone")


def test_a_run_that_was_killed_leaves_a_child_that_finishes(tmp_path, entries):
    """The kernel closes the run's end of the pipe."""
    write(entries, {"step": 1})
    found = started(tmp_path, CHILD)
    found._children["wandb"].stdin.close()
    assert found._children["wandb"].wait(20) == 0
    assert (tmp_path / "child").read_text() == "a run\n1\ndone"


def test_an_unfinished_line_is_read_when_it_is_finished(tmp_path, entries):
    """The file may be read in the middle of a write; a line that stays torn is left out."""
    parts = [b'{"step": 1}\n{"st', b'ep": 2}', b'\n{"step"']

    def ended():
        if parts:
            entries.write(parts.pop(0))
        return not parts

    assert list(follow(entries.name, ended)) == [{"step": 1}, {"step": 2}]


def test_a_name_that_is_no_tracker_is_refused():
    """The error lists those there are."""
    with pytest.raises(InputError, match="tensorboard, wandb, trackio"):
        Trackers(["mlflow"], {})
    with pytest.raises(InputError, match="each tracker once"):
        Trackers(["wandb", "wandb"], {})


def test_a_library_that_is_not_installed_says_how_to_install_it(monkeypatch, tmp_path):
    """The extra's name is in the error."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(InputError, match=r"pip install -e '\.\[wandb\]'"):
        trackers.wandb({"directory": str(tmp_path), "run": "r", "config": {}}, [])


def test_names_of_numbers():
    """Training rows, evaluations by their set, nothing of texts and configurations."""
    step = {"kind": "step", "time": 1.0, "step": 3, "loss": 2.0, "skipped": 0}
    assert trackers.scalars(step) == {"train/loss": 2.0, "train/skipped": 0.0}
    scores = {"kind": "evaluation", "step": 3, "loss": 1.5}
    assert trackers.scalars(scores) == {"validation/loss": 1.5}
    assert trackers.scalars({**scores, "split": "code"}) == {"code/loss": 1.5}
    assert trackers.scalars({"kind": "config", "steps": 4}) == {}


NAME = "events"


class Ticks:
    """A clock that a test moves."""

    now = 0.0

    def __call__(self):
        return self.now


def test_on_an_object_store_the_file_is_uploaded_whole_now_and_then():
    """Nothing before its time, all of it at its time and at the end; the local copy goes."""
    clock = Ticks()
    spool = Spool("memory://spool/run", clock)
    path = spool.path / "events"
    path.write_text("1\n")
    spool.sync()
    url = "memory://spool/run/events"
    assert storage.size(url) is None
    clock.now += 31
    spool.sync()
    assert storage.read_bytes(url) == b"1\n"
    path.write_text("1\n2\n")
    spool.sync()
    assert storage.read_bytes(url) == b"1\n"
    spool.close()
    assert storage.read_bytes(url) == b"1\n2\n"
    assert not spool.path.exists()


class Store:
    """`memory://`, which fails as often as it is told to."""

    def __init__(self, monkeypatch, error=None):
        self.write, self.error, self.failures = storage.write_atomic, error, 0
        monkeypatch.setattr(storage, "write_atomic", self)

    def __call__(self, url, data):
        if self.failures:
            self.failures -= 1
            raise self.error or StoreUnavailable(f"{url}: 503")
        self.write(url, data)


def test_a_store_that_fails_is_tried_again_and_given_up_at_the_end(monkeypatch, caplog):
    """An upload that failed is made up for by the next; at the end the local copy is left."""
    store, clock = Store(monkeypatch), Ticks()
    spool = Spool("memory://gone/run", clock)
    (spool.path / NAME).write_text("1\n")
    for store.failures in (1, 0):
        clock.now += 31
        spool.sync()
    assert storage.read_bytes(f"memory://gone/run/{NAME}") == b"1\n"
    assert caplog.text.count("will be retried") == 1
    (spool.path / NAME).write_text("1\n2\n")
    store.failures = 1
    with pytest.raises(StoreUnavailable):
        spool.close()
    assert (spool.path / NAME).read_text() == "1\n2\n"
    shutil.rmtree(spool.path)


def test_what_is_not_permitted_ends_it_at_once(monkeypatch):
    """No later try can do better."""
    store, clock = Store(monkeypatch, InputError("not permitted")), Ticks()
    spool = Spool("memory://refused/run", clock)
    (spool.path / NAME).write_text("1\n")
    clock.now, store.failures = 31, 1
    with pytest.raises(InputError):
        spool.sync()
    shutil.rmtree(spool.path)
