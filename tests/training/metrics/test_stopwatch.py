"""The stopwatch's buckets add up exactly, and waits for data are what the devices wait."""

import contextlib
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.metrics.stopwatch import BUCKETS, Stopwatch, TimedBatches


class Clock:
    """Nanoseconds that a test moves."""

    now = 10**15

    def __call__(self):
        return self.now


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["switch", "pass", "count_as"]),
        st.sampled_from(BUCKETS),
        st.integers(0, 10**12),
    ),
    max_size=30,
)


@pytest.mark.slow
@given(ACTIONS)
def test_buckets_add_up_to_the_nanosecond(actions):
    """After any sequence of calls every bucket has what passed while it was on, exactly."""
    clock = Clock()
    watch = Stopwatch(clock=clock)
    began, expected, current, since = clock.now, dict.fromkeys(BUCKETS, 0), "init", 0
    for action, bucket, amount in actions:
        if action == "pass":
            clock.now += amount
            expected[current] += amount
            since += amount
        elif action == "switch":
            assert watch.switch(bucket) == current
            current, since = bucket, 0
        else:
            watch.count_as(bucket, amount)
            moved = min(amount, since)
            expected[current] -= moved
            expected[bucket] += moved
            since = 0
        assert watch.nanoseconds() == expected
    assert sum(watch.nanoseconds().values()) == clock.now - began


def test_during_comes_back_to_the_bucket_before_also_after_an_error():
    """Contexts nest, and an exception does not leave the watch in the wrong bucket."""
    clock = Clock()
    watch = Stopwatch("step", clock)
    with contextlib.suppress(ValueError), watch.during("checkpoint"):
        clock.now += 5
        with watch.during("evaluation"):
            clock.now += 7
        raise ValueError("no")
    clock.now += 11
    spent = watch.nanoseconds()
    assert (spent["checkpoint"], spent["evaluation"], spent["step"]) == (5, 7, 11)


def test_another_thread_always_reads_a_whole():
    """While one thread switches, what another reads never shrinks and never falls short."""
    watch = Stopwatch()
    stop = threading.Event()

    def switch():
        while not stop.is_set():
            with watch.during("data_wait"):
                pass

    thread = threading.Thread(target=switch)
    thread.start()
    sums = [sum(watch.nanoseconds().values()) for _ in range(2000)]
    stop.set()
    thread.join()
    assert sums == sorted(sums)


class Step:
    """A step on the devices that ends at a time of the test's clock."""

    def __init__(self, clock, ends):
        self.clock, self.ends = clock, ends

    def is_ready(self):
        return self.clock.now >= self.ends

    def block_until_ready(self):
        self.clock.now = max(self.clock.now, self.ends)


MS = 10**6


def simulate(loads, step, ahead=False):
    """Milliseconds of each wait, and in the bucket.

    Batch i is there `loads[i]` after it was asked for, or with `ahead` after the batch before it.
    """
    clock = Clock()
    watch = Stopwatch("step", clock)

    def batches():
        there = clock.now
        for load in loads:
            there = (there if ahead else clock.now) + load * MS
            clock.now = max(clock.now, there)
            yield load

    feed = TimedBatches(batches(), watch, clock)
    waits, busy_until, before = [], clock.now, 0
    for _ in feed:
        spent = watch.nanoseconds()["data_wait"]
        waits.append((spent - before) / MS)
        before = spent
        busy_until = max(busy_until, clock.now) + step * MS
        feed.set_inflight(Step(clock, busy_until))
    return waits, before / MS


def test_waiting_while_the_devices_compute_is_no_wait():
    """Batches that come before the step is done cost nothing but the first."""
    waits, total = simulate([5, 10, 10, 10], step=200)
    assert waits == [5, 0, 0, 0]
    assert total == 5


def test_a_slow_loader_counts_by_what_the_devices_miss():
    """It reads ahead, a batch in 300 ms, and a step takes 200: the devices miss 100 of each.

    The batch that shows it counts in full, for what the step before had hidden is not known.
    """
    waits, _ = simulate([300, 300, 300, 300, 300], step=200, ahead=True)
    assert waits == [300, 300, 100, 100, 100]


def test_one_slow_batch_changes_nothing_for_those_after_it():
    """As soon as a batch is there at once, steps are not waited for any more."""
    waits, _ = simulate([0, 300, 0, 10], step=200)
    assert waits == [0, 300, 0, 0]
