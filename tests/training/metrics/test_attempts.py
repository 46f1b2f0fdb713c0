"""What an attempt's rows say of its time: also those of one that was killed."""

import json
import os
import signal
import subprocess
import sys
import time

import msgspec

from pipeline.store.decode import json_line
from training.metrics.goodput import Attempt, Mark, fold, in_order, read_attempts
from training.metrics.metrics_log import NAME, read_log, write_history

CONFIG = {"attempt": "a", "build": "b1", "device": "cpu", "devices": 8, "processes": 2}


def log(directory, *rows):
    """A metrics log of (kind, fields), one a second from 1000 on."""
    directory.mkdir(parents=True)
    lines = [
        json_line({"kind": kind, "time": 1000.0 + n, **fields})
        for n, (kind, fields) in enumerate(rows)
    ]
    (directory / NAME).write_bytes(b"".join(lines))
    return str(directory)


def times(done, startup=(), **buckets):
    return {"step": done, "buckets": buckets, "startup": dict(startup)}


def test_what_the_rows_say(tmp_path):
    """Buckets, steps and marks as they were when each was told, and the outcome at the end."""
    directory = log(
        tmp_path / "a",
        ("config", CONFIG),
        ("time", times(0, init=4.0)),
        ("began", {"step": 10, "loaded": True}),
        ("step", {"step": 11, "loss": 1.0}),
        ("time", {**times(12, init=4.0, step=6.0), "saved": True}),
        ("time", {**times(13, {"importing": 1.5}, init=4.0, step=11.0), "outcome": "preempted"}),
    )
    (found,) = read_attempts([directory, str(tmp_path / "none")])
    assert found == Attempt(
        **CONFIG,
        began=997.0,
        buckets={"init": 4.0, "step": 11.0},
        first_step=10,
        last_step=13,
        outcome="preempted",
        marks=(Mark(12, {"init": 4.0, "step": 6.0}),),
        startup={"importing": 1.5},
        loaded=True,
    )
    assert (found.seconds, found.marks[0].at) == (15.0, 10.0)
    record = str(tmp_path / "record")
    write_history(record, [(directory, os.path.getsize(f"{directory}/{NAME}"))], [json_of(found)])
    kinds = [row["kind"] for row in read_log(record)]
    assert kinds == ["step", "attempt"]
    (again,) = (msgspec.convert(row, Attempt) for row in read_log(record, kinds=["attempt"]))
    assert again == found


def json_of(attempt):
    return json.loads(msgspec.json.encode(attempt))


def test_no_step_is_the_first_before_the_state_is_there(tmp_path):
    """An attempt killed while it restores says nothing of where it went on; 0 would be a claim."""
    rows = [{"kind": "config", **CONFIG}, {"kind": "time", "time": 1.0, **times(0)}]
    assert fold(rows).first_step is None
    assert fold([*rows, {"kind": "began", "step": 0}]).first_step == 0


def test_only_attempts_at_the_build_count_and_logs_of_older_versions_are_left_out(tmp_path):
    """A rebuild has a time of its own; a log without times has none."""
    rows = ("time", times(0))
    one = log(tmp_path / "1", ("config", CONFIG), rows)
    two = log(tmp_path / "2", ("config", {**CONFIG, "build": "b2"}), rows)
    old = log(tmp_path / "3", ("config", {"run": "r", "attempt": "a"}), ("began", {"step": 0}))
    assert [each.build for each in read_attempts([one, two, old])] == ["b1", "b2"]
    assert [each.build for each in read_attempts([one, two, old], "b2")] == ["b2"]


def test_attempts_of_a_step_are_in_the_order_of_their_leases():
    """Whatever their machines' clocks said; a million leases are one digit more."""
    names = ["999999-ffffffff", "1000000-00000000", "1000001-aaaaaaaa"]
    found = [
        Attempt(attempt=name, began=began, buckets={})
        for began, name in zip((5.0, -100.0, 4.0), names, strict=True)
    ]
    assert in_order(reversed(found)) == found
    unnamed = [
        Attempt(attempt=name, began=began, buckets={}) for name, began in (("b", 1), ("a", 2))
    ]
    assert in_order(reversed(unnamed)) == unnamed


KILLED = """
import sys, time
from training.metrics import metrics_log
from training.metrics.stopwatch import Stopwatch
metrics_log.TIMES_SECONDS, watch, step = 0.05, Stopwatch("step"), 0
times = lambda: {"step": step, "buckets": watch.seconds(), "startup": watch.startup}
log = metrics_log.MetricsLog(sys.argv[1], times, every=0.02)
names = ("attempt", "build", "device", "devices", "processes")
log.write("config", dict.fromkeys(names, ""))
for step in range(10**9):
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
    (found,) = read_attempts([str(tmp_path)])
    assert found.outcome == "running"
    assert 0 < found.last_step <= last + 50
    assert found.seconds <= elapsed + 5
    assert found.buckets["step"] > 0
