"""No tracker can hold up or end a run, whatever it does; metrics.jsonl has everything."""

import json
import sys
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import InputError
from training.metrics.trackers import backends, outlets
from training.metrics.trackers.child_process import ChildTracker
from training.metrics.trackers.context import TrackerContext
from training.metrics.trackers.files import NAME, JsonLines, read_lines
from training.metrics.trackers.outlets import Outlet, Trackers, open_trackers


class Kept:
    """A tracker that keeps what it gets; subclasses misbehave."""

    def __init__(self):
        self.entries, self.closed, self.abandoned = [], False, False

    def write(self, entries):
        self.entries += entries

    def close(self):
        self.closed = True

    def abandon(self):
        self.abandoned = True


class Raises(Kept):
    """Fails at the first entry, with something that is not even an `Exception`."""

    def write(self, entries):
        if entries:
            raise SystemExit("quota exceeded")


class Hangs(Kept):
    """Never comes back."""

    never = threading.Event()

    def write(self, entries):
        self.never.wait(60)


class Slow(Kept):
    """Takes 50 ms for whatever it is given."""

    def write(self, entries):
        time.sleep(0.05)
        super().write(entries)


class HangsAtTheEnd(Kept):
    """Waits for an upload that does not end."""

    def close(self):
        Hangs.never.wait(60)


def outlet(tracker, capacity=1000):
    return Outlet(type(tracker).__name__, lambda: tracker, capacity, every=0.005)


def context(directory, **config):
    return TrackerContext(directory=str(directory), run="run", attempt="a", config=config)


def test_everything_arrives_in_order_at_every_tracker(tmp_path):
    """A good tracker and the file have every entry, and the fields are as they were then."""
    good = Kept()
    both = Trackers([outlet(good), Outlet("jsonl", lambda: JsonLines(str(tmp_path)), every=0.005)])
    fields = {"step": 0}
    for step in range(500):
        fields["step"] = step
        both.log("step", fields)
    both.close()
    assert [each["step"] for each in good.entries] == list(range(500))
    assert good.closed
    assert read_lines(str(tmp_path / NAME)) == good.entries
    assert both.dropped == {"Kept": 0, "jsonl": 0}


@pytest.mark.parametrize("kind", [Raises, Hangs, Slow, HangsAtTheEnd])
def test_a_bad_tracker_disturbs_neither_the_run_nor_the_others(kind, caplog):
    """Logging raises nothing and returns, the good one gets everything, closing ends in time."""
    good, bad = Kept(), kind()
    both = Trackers([outlet(bad, capacity=10), outlet(good, capacity=10**6)])
    for step in range(20_000):
        both.log("step", {"step": step})
    both.close(seconds=0.5)
    assert [each["step"] for each in good.entries] == list(range(20_000))
    if kind in (Raises, Hangs):
        assert both.dropped[kind.__name__] >= 19_980
    if kind is Raises:
        assert caplog.text.count("disabled: SystemExit: quota exceeded") == 1
    if kind in (Hangs, HangsAtTheEnd):
        assert "not done in time" in caplog.text
    if kind is not Slow:
        assert bad.abandoned


def test_a_tracker_that_cannot_be_opened_is_said_once(caplog):
    """Opening happens in its thread; the run hears of it in the log alone."""

    def fail():
        raise ImportError("no module named wandb")

    one = Trackers([Outlet("wandb", fail, every=0.005)])
    for step in range(10):
        one.log("step", {"step": step})
    one.close()
    assert caplog.text.count("disabled: ImportError") == 1
    assert one.dropped == {"wandb": 10}


@given(st.integers(1, 20), st.lists(st.integers(0, 30), max_size=5))
def test_the_oldest_entries_are_dropped_and_counted(capacity, bursts):
    """Of each burst the newest arrive, as many as there is room for."""
    go = threading.Event()
    got = []

    class Waits(Kept):
        def write(self, entries):
            go.wait(10)
            got.extend(entries)

    tracker = Waits()
    one = Outlet("waits", lambda: tracker, capacity, every=0.001)
    while one._tracker is None:
        time.sleep(0.001)
    time.sleep(0.005)  # it waits in its first write, which has nothing
    count = sum(bursts)
    for number in range(count):
        one.put({"number": number})
    go.set()
    one.begin_to_close()
    one.finish(10)
    kept = min(capacity, count)
    assert [each["number"] for each in got] == list(range(count - kept, count))
    assert one.dropped == count - kept


def test_a_name_that_is_no_tracker_is_refused(tmp_path):
    """The error lists those there are."""
    with pytest.raises(InputError, match="tensorboard, wandb, trackio"):
        open_trackers(["mlflow"], context(tmp_path))
    with pytest.raises(InputError, match="each once"):
        open_trackers(["wandb", "wandb"], context(tmp_path))


def test_secrets_of_the_environment_are_written_nowhere(tmp_path, monkeypatch):
    """A canary in the variables that keys are read from is in none of the files."""
    for name in ("WANDB_API_KEY", "HF_TOKEN", "GOOGLE_APPLICATION_CREDENTIALS"):
        monkeypatch.setenv(name, "canary-1234")
    run = open_trackers(["tensorboard", "wandb", "trackio"], context(tmp_path, learning_rate=0.1))
    run.log("step", {"step": 1, "loss": 2.0})
    run.close(seconds=20)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert tmp_path / NAME in files
    assert not any(b"canary" in path.read_bytes() for path in files)
    first = read_lines(str(tmp_path / NAME))[0]
    assert (first["kind"], first["run"], first["learning_rate"]) == ("config", "run", 0.1)


CHILD = """
import json, sys
first = json.loads(sys.stdin.readline())
with open(first["directory"] + "/child", "w") as file:
    for line in sys.stdin:
        file.write(line)
        file.flush()
        if json.loads(line).get("loss") == "bad":
            sys.exit("bad loss, said the library")
    file.write("done")
"""


def child(tmp_path, code=CHILD):
    return ChildTracker("wandb", context(tmp_path), [sys.executable, "-c", code])


def test_a_child_gets_the_entries_and_finishes(tmp_path):
    """Lines of JSON through a pipe; closing waits for its end."""
    tracker = child(tmp_path)
    tracker.write([{"step": 1}, {"step": 2}])
    tracker.write([])
    tracker.close()
    assert (tmp_path / "child").read_text() == '{"step": 1}\n{"step": 2}\ndone'


def test_a_child_that_dies_says_why(tmp_path):
    """Its last words are in the error."""
    tracker = child(tmp_path)
    tracker.write([{"loss": "bad"}])
    tracker._process.wait(10)
    with pytest.raises(RuntimeError, match="bad loss, said the library"):
        tracker.write([])


def test_a_child_that_hangs_is_killed(tmp_path, caplog):
    """It neither reads nor ends: the pipe fills, the thread waits in it, and closing gives up."""
    started = []

    def make():
        started.append(child(tmp_path, "import time; time.sleep(1000)"))
        return started[0]

    one = Trackers([Outlet("hangs", make, every=0.005)])
    for step in range(5000):
        one.log("step", {"step": step, "text": "x" * 100})
    while not started:
        time.sleep(0.01)
    one.close(seconds=0.3)
    assert started[0]._process.wait(10) != 0
    assert "not done in time" in caplog.text


def test_a_library_that_is_not_installed_says_how_to_install_it(monkeypatch, tmp_path):
    """The extra's name is in the error."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(InputError, match=r"pip install 'ponente\[wandb\]'"):
        backends.open_backend("wandb", {"directory": str(tmp_path), "run": "r", "config": {}})


def test_names_of_numbers():
    """Training rows, evaluations by their set, nothing of texts and configurations."""
    step = {"kind": "step", "time": 1.0, "step": 3, "loss": 2.0, "skipped": 0}
    assert backends.scalars(step) == {"train/loss": 2.0, "train/skipped": 0.0}
    scores = {"kind": "evaluation", "step": 3, "loss": 1.5}
    assert backends.scalars(scores) == {"validation/loss": 1.5}
    assert backends.scalars({**scores, "set": "code"}) == {"code/loss": 1.5}
    assert backends.scalars({"kind": "config", "steps": 4}) == {}


def test_logging_does_not_wait_for_the_threads(monkeypatch):
    """A thread that holds its own queue's entries does not hold the queue."""
    slow = Slow()
    one = Trackers([outlet(slow, capacity=outlets.CAPACITY)])
    for step in range(outlets.CAPACITY):
        one.log("step", {"step": step})
    one.close()
    assert json.dumps(slow.entries).count('"kind": "step"') == outlets.CAPACITY
