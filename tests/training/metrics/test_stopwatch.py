"""The stopwatch's buckets add up exactly, whatever is done with it."""

import contextlib
import threading

from hypothesis import given
from hypothesis import strategies as st

from training.metrics.stopwatch import BUCKETS, Stopwatch


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
