"""The account of a run against a simulation that knows of every second what became of it."""

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.store.decode import json_line
from training.metrics.goodput import LOST, AttemptTime, Mark, account, fold, read_attempts
from training.metrics.metrics_log import NAME, read_log, write_history
from training.metrics.stopwatch import BUCKETS

MARKED = 3
"""Steps between two checkpoints of the simulation."""

COMPILED = 5
"""Seconds from the beginning of an attempt until it has its state."""


def simulate(seed, kills, gaps, damage=0.0):
    """A run second by second: (attempts, seconds by what became of them).

    Every second belongs to a bucket; two seconds of `step` make a step. An attempt dies at the
    second of `kills` that belongs to it, and the next goes on from the newest checkpoint, or an
    older one where it was damaged. One that dies before it has its state finds no damage.
    """
    rng = random.Random(seed)
    seconds = []  # [attempt, bucket or "dead", checkpointed step that must stand for it to count]
    attempts, now, saved = [], 1_000_000, [0]
    for index in range(len(kills) + 1):
        life = kills[index] if index < len(kills) else rng.randrange(1, 60)
        while life > COMPILED and len(saved) > 1 and rng.random() < damage:
            saved.pop()
        first = step = saved[-1]
        # Whoever goes on from an older checkpoint does again what newer ones held.
        for second in seconds:
            if second[2] is None or second[2] > first:
                second[1] = "dead" if second[1] == "dead" else "redone"
        buckets, marks = dict.fromkeys(BUCKETS, 0.0), []
        began, half, open_seconds = now, 0, []
        for t in range(life):
            bucket = "init" if t < 3 else "compile" if t < COMPILED else rng.choice(BUCKETS[2:])
            buckets[bucket] += 1.0
            entry = [index, bucket, None]
            seconds.append(entry)
            open_seconds.append(entry)
            if bucket == "step":
                half += 1
                if half % 2 == 0:
                    step += 1
                    if step % MARKED == 0:
                        marks.append(Mark(step, dict(buckets)))
                        saved.append(step)
                        for each in open_seconds:
                            each[2] = step
                        open_seconds = []
            now += 1
        attempts.append(
            AttemptTime(
                attempt=f"a{index}",
                began=float(began),
                buckets=buckets,
                first_step=first if life > COMPILED else None,
                last_step=step if life > COMPILED else 0,
                marks=tuple(marks),
            )
        )
        if index < len(kills):
            seconds += [[index, "dead", None] for _ in range(gaps[index])]
            now += gaps[index]
    truth = dict.fromkeys((*BUCKETS, *LOST), 0)
    for _, bucket, _ in seconds:
        truth[bucket] += 1
    return attempts, truth


RUNS = st.integers(0, 5).flatmap(
    lambda n: st.tuples(
        st.integers(0, 10**6),
        st.lists(st.integers(1, 60), min_size=n, max_size=n),
        st.lists(st.integers(0, 30), min_size=n, max_size=n),
        st.sampled_from([0.0, 0.5]),
    )
)


@given(RUNS, st.randoms())
def test_every_second_of_a_run_is_where_the_simulation_put_it(run, shuffle):
    """Any number of kills, dead times and damaged checkpoints; attempts in any order."""
    attempts, truth = simulate(*run)
    shuffled = list(attempts)
    shuffle.shuffle(shuffled)
    found = account(shuffled)
    assert found.parts == pytest.approx(truth)
    assert found.total == sum(truth.values())
    assert len(found.spans) == len(attempts)


@given(RUNS, st.randoms())
def test_names_of_leases_put_attempts_in_order_whatever_the_clocks_say(run, shuffle):
    """A machine's clock a day off, each attempt on another: what counts is what counted."""
    attempts, truth = simulate(*run)
    skewed = [
        dataclasses.replace(
            each,
            attempt=f"{999_998 + number:06d}-{shuffle.getrandbits(32):08x}",
            began=each.began + shuffle.uniform(-86_400, 86_400),
        )
        for number, each in enumerate(attempts)
    ]
    shuffle.shuffle(skewed)
    found = account(skewed)
    assert [span.attempt.buckets for span in found.spans] == [each.buckets for each in attempts]
    counted = {name: found.parts[name] for name in BUCKETS}
    assert counted == pytest.approx({name: truth[name] for name in BUCKETS})
    assert min(found.parts.values()) >= 0
    assert sum(found.parts.values()) == pytest.approx(found.total)


ATTEMPTS = st.lists(
    st.builds(
        lambda began, spent, first, steps: AttemptTime(
            attempt=f"{began}",
            began=began,
            buckets={"init": spent[0], "step": spent[1]},
            first_step=first,
            last_step=(first or 0) + steps,
            marks=(Mark((first or 0) + steps, {"init": spent[0], "step": spent[1] / 2}),),
        ),
        st.floats(-100, 100),
        st.tuples(st.floats(0, 100), st.floats(0, 100)),
        st.none() | st.integers(0, 20),
        st.integers(0, 20),
    ),
    max_size=5,
)


@given(ATTEMPTS)
def test_clocks_that_contradict_each_other_still_give_an_account_that_adds_up(attempts):
    """Overlaps, jumps back, steps that go back: no part is negative and parts make the total."""
    found = account(attempts)
    assert min(found.parts.values()) >= -1e-6
    assert sum(found.parts.values()) == pytest.approx(found.total, abs=1e-6)
    ends = [0.0]
    for span in found.spans:
        assert ends[-1] - 1e-6 <= span.began <= span.useful + 1e-6 <= span.ended + 2e-6
        ends.append(span.ended)


def attempt(name, began, step_seconds, first, last, *marks, outcome="running"):
    return AttemptTime(
        attempt=name,
        began=began,
        buckets={"step": step_seconds},
        first_step=first,
        last_step=last,
        marks=tuple(Mark(step, {"step": at}) for step, at in marks),
        outcome=outcome,
    )


@pytest.mark.parametrize(
    ("began", "first", "step", "redone", "dead"),
    [
        (90, 8, 130, 10, 0),  # the first lived on after its lease was lost: cut where this begins
        (70, 8, 130, 0, 0),  # this clock is behind: it cannot begin before its checkpoint
        (130, 12, 150, 0, 30),  # the rows end before the checkpoint: all of the first counts
    ],
)
def test_the_next_attempt_decides_what_counts(began, first, step, redone, dead):
    """Of one of 100 s with a checkpoint of step 8 after 80 s; the next one takes 50 s."""
    found = account([attempt("a", 0, 100, 0, 10, (8, 80.0)), attempt("b", began, 50, first, 20)])
    assert (found.parts["step"], found.parts["redone"], found.parts["dead"]) == (step, redone, dead)
    assert found.total == step + redone + dead


def test_no_attempts_have_an_account_of_nothing():
    found = account([])
    assert found.total == 0
    assert set(found.parts.values()) == {0.0}
    assert found.goodput != found.goodput


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
    assert found == AttemptTime(
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
    (again,) = (msgspec.convert(row, AttemptTime) for row in read_log(record, kinds=["attempt"]))
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


@pytest.mark.slow
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
