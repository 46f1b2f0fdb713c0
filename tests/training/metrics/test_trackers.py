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
    with pytest.raises(InputError, match="tensorboard, wandb, trackio"):
        Trackers(["mlflow"], {})
    with pytest.raises(InputError, match="each tracker once"):
        Trackers(["wandb", "wandb"], {})


def test_a_library_that_is_not_installed_says_how_to_install_it(monkeypatch, tmp_path):
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


class Spooled:
    """A spool of a store that fails with the next of `errors`, and its clock."""

    def __init__(self, monkeypatch, name):
        write, self.errors, self.now = storage.write_atomic, [], 0.0

        def write_or_fail(url, data):
            if self.errors:
                raise self.errors.pop()
            write(url, data)

        monkeypatch.setattr(storage, "write_atomic", write_or_fail)
        self.spool = Spool(f"memory://{name}/run", lambda: self.now)
        self.file, self.url = self.spool.path / "events", f"memory://{name}/run/events"

    def sync(self, text, after=0.0):
        self.file.write_text(text)
        self.now += after
        self.spool.sync()
        return storage.read_bytes(self.url).decode() if storage.exists(self.url) else ""


def test_on_an_object_store_the_file_is_uploaded_whole_now_and_then(monkeypatch):
    """Nothing before its time, all of it at its time and at the end; the local copy goes."""
    made = Spooled(monkeypatch, "spool")
    assert made.sync("1\n") == ""
    assert made.sync("1\n", after=31) == made.sync("1\n2\n") == "1\n"
    made.spool.close()
    assert storage.read_bytes(made.url) == b"1\n2\n"
    assert not made.spool.path.exists()


def test_a_store_that_fails_is_tried_again_and_given_up_at_the_end(monkeypatch, caplog):
    """At the end the local copy is left; what is not permitted ends it at once."""
    made = Spooled(monkeypatch, "gone")
    made.errors = [StoreUnavailable("503")]
    assert made.sync("1\n", after=31) == ""
    assert made.sync("1\n", after=31) == "1\n"
    assert caplog.text.count("will be retried") == 1
    made.errors = [InputError("not permitted")]
    with pytest.raises(InputError):
        made.sync("1\n2\n", after=31)
    made.errors = [StoreUnavailable("503")]
    with pytest.raises(StoreUnavailable):
        made.spool.close()
    assert made.file.read_text() == "1\n2\n"
    shutil.rmtree(made.spool.path)
