"""The account of a run against a simulation that knows of every second what became of it."""

import dataclasses
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.metrics.goodput import LOST, Attempt, Mark, account
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
            Attempt(
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
        lambda began, spent, first, steps: Attempt(
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
    return Attempt(
        attempt=name,
        began=began,
        buckets={"step": step_seconds},
        first_step=first,
        last_step=last,
        marks=tuple(Mark(step, {"step": at}) for step, at in marks),
        outcome=outcome,
    )


def test_a_process_that_was_given_up_but_lived_on_is_cut_where_the_next_begins():
    """It took its checkpoint at 80, the next began at 90; what it did to 100 is nobody's."""
    found = account([attempt("a", 0, 100, 0, 10, (8, 80.0)), attempt("b", 90, 50, 8, 14)])
    assert found.total == 140
    assert (found.parts["redone"], found.parts["dead"]) == (10, 0)


def test_a_clock_that_is_behind_cannot_make_an_attempt_begin_before_its_checkpoint():
    """The next one's clock says 70, its checkpoint was taken at 80: it begins at 80."""
    found = account([attempt("a", 0, 100, 0, 10, (8, 80.0)), attempt("b", 70, 50, 8, 14)])
    assert found.total == 130
    assert (found.parts["step"], found.parts["redone"]) == (130, 0)


def test_a_preempted_attempt_that_saved_its_last_step_loses_nothing():
    """What came after the mark was the end of the save."""
    stopped = attempt("a", 0, 100, 0, 10, (10, 95.0), outcome="preempted")
    found = account([stopped, attempt("b", 130, 50, 10, 14)])
    assert (found.parts["redone"], found.parts["dead"]) == (0, 30)


def test_a_journal_that_ends_before_the_checkpoint_counts_in_full():
    """The kill came before it was written again; what is missing between is dead time."""
    found = account([attempt("a", 0, 100, 0, 10, (8, 80.0)), attempt("b", 130, 50, 12, 20)])
    assert (found.parts["step"], found.parts["redone"], found.parts["dead"]) == (150, 0, 30)


def test_no_attempts_have_an_account_of_nothing():
    """Zero of everything, and no division."""
    found = account([])
    assert found.total == 0
    assert set(found.parts.values()) == {0.0}
    assert found.goodput != found.goodput
