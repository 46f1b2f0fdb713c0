"""The account of an attempt: written whole, written by a thread, and never in the way."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.metrics.journal import MOST_MARKS, Attempt, Journal, Mark, read_journals
from training.metrics.stopwatch import BUCKETS, Stopwatch


class Clock:
    """Nanoseconds that a test moves."""

    now = 0

    def __call__(self):
        return self.now


BUCKET_SECONDS = st.dictionaries(st.sampled_from(BUCKETS), st.floats(0, 1e6))


@given(BUCKET_SECONDS, st.lists(st.tuples(st.integers(0, 10**6), BUCKET_SECONDS), max_size=4))
def test_an_account_reads_back_as_it_was_written(buckets, marks):
    """Through JSON and back it is equal."""
    attempt = Attempt(
        attempt="a",
        began=1.5,
        buckets=buckets,
        last_step=7,
        marks=tuple(Mark(step, spent) for step, spent in marks),
    )
    assert Attempt.from_json(attempt.to_json()) == attempt


def test_every_prefix_of_a_journal_is_refused(tmp_path, caplog):
    """A torn file is left out and said; the whole ones beside it are read, by their beginning."""
    whole = Attempt(attempt="b", began=2.0, buckets={"step": 1.0}).to_json()
    for end in range(len(whole)):
        with pytest.raises(ValueError, match=r"journal|line|format|delimiter|Expecting"):
            Attempt.from_json(whole[:end])
    (tmp_path / "b.json").write_bytes(whole)
    (tmp_path / "a.json").write_bytes(Attempt(attempt="a", began=3.0, buckets={}).to_json())
    (tmp_path / "torn.json").write_bytes(whole[:40])
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "other.txt").write_text("x")
    assert [each.attempt for each in read_journals(str(tmp_path))] == ["b", "a"]
    assert caplog.text.count("left out of the account") == 2


def test_accounts_of_a_step_are_read_in_the_order_of_their_leases(tmp_path):
    """Whatever their machines' clocks said; a million leases are one digit more."""
    names = ["999999-ffffffff", "1000000-00000000", "1000001-aaaaaaaa"]
    for began, name in zip((5.0, -100.0, 4.0), names, strict=True):
        journal = Attempt(attempt=name, began=began, buckets={})
        (tmp_path / f"{name}.json").write_bytes(journal.to_json())
    assert [each.attempt for each in read_journals(str(tmp_path))] == names


def test_a_journal_of_another_format_is_refused():
    """The error names both."""
    tree = json.loads(Attempt(attempt="a", began=0.0, buckets={}).to_json())
    with pytest.raises(ValueError, match=r"format 1, found 99"):
        Attempt.from_json(json.dumps({**tree, "format": 99}).encode())


def test_what_the_journal_says(tmp_path):
    """Buckets, steps and marks as they were when each was told, and the outcome at the end."""
    clock = Clock()
    watch = Stopwatch(clock=clock)
    clock.now += 4 * 10**9
    journal = Journal(
        str(tmp_path), "a1", watch, device="cpu", devices=8, processes=2, unix=lambda: 1000.0
    )
    journal.begin(10)
    watch.switch("step")
    clock.now += 6 * 10**9
    journal.step(12)
    journal.mark(12)
    clock.now += 5 * 10**9
    journal.step(13)
    journal.close("preempted")
    (found,) = read_journals(str(tmp_path))
    assert found.began == 996.0
    assert (found.first_step, found.last_step, found.outcome) == (10, 13, "preempted")
    assert (found.device, found.devices, found.processes) == ("cpu", 8, 2)
    assert found.buckets["init"] == 4.0
    assert found.buckets["step"] == 11.0
    assert found.seconds == 15.0
    (mark,) = found.marks
    assert (mark.step, mark.at, mark.buckets["step"]) == (12, 10.0, 6.0)


def test_no_step_is_the_first_before_the_state_is_there(tmp_path):
    """An attempt killed while it restores says nothing of where it went on; 0 would be a claim."""
    for number, begins in enumerate((None, 0, 7)):
        journal = Journal(str(tmp_path), f"a{number}", Stopwatch(), unix=lambda n=number: 1e6 + n)
        if begins is not None:
            journal.begin(begins)
        journal.close("failed")
    assert [found.first_step for found in read_journals(str(tmp_path))] == [None, 0, 7]


def test_a_store_that_fails_is_said_once(caplog):
    """The run goes on, the thread tries again, and one warning names the file."""
    tries = []

    def write(url, data):
        tries.append(data)
        raise OSError("no room")

    journal = Journal("memory://j", "a", Stopwatch(), interval=0.01, write=write)
    while len(tries) < 3:
        time.sleep(0.01)
    journal.close("finished")
    assert caplog.text.count("has gaps") == 1
    assert "a.json" in caplog.text


def test_a_store_that_hangs_holds_up_nothing(caplog):
    """Marks return at once, and closing gives up at its deadline."""
    hung = threading.Event()
    journal = Journal("memory://j", "a", Stopwatch(), write=lambda url, data: hung.wait(60))
    for step in range(100):
        journal.mark(step)
    journal.close("finished", 0.2)
    assert "does not answer" in caplog.text
    hung.set()


def test_old_marks_go_first():
    """The journal of a long run stays small."""
    journal = Journal("memory://j", "a", Stopwatch(), write=lambda url, data: None)
    for step in range(MOST_MARKS + 5):
        journal.mark(step)
    marks = journal.snapshot().marks
    assert [marks[0].step, marks[-1].step, len(marks)] == [5, MOST_MARKS + 4, MOST_MARKS]
    journal.close("finished")


KILLED = """
import sys, time
from training.metrics.stopwatch import Stopwatch
from training.metrics.journal import Journal
journal = Journal(sys.argv[1], "a", Stopwatch("step"), interval=0.05)
for step in range(10**9):
    journal.step(step)
    print(step, flush=True)
    time.sleep(0.01)
"""


def test_kill_9_loses_one_interval_at_most(tmp_path):
    """What is left after SIGKILL is whole, and not much older than the kill."""
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    began = time.monotonic()
    for line in process.stdout:
        last = int(line)
        if last >= 100:
            break
    elapsed = time.monotonic() - began
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    (found,) = read_journals(str(tmp_path))
    assert found.outcome == "running"
    assert 0 < found.last_step <= last + 50
    assert found.seconds <= elapsed + 5
    assert dataclasses.asdict(found)["buckets"]["step"] > 0
