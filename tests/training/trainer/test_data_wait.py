"""Waits for data are what the devices wait, not what the host does."""

from training.metrics.stopwatch import Stopwatch, TimedBatches


class Clock:
    """Nanoseconds that a test moves."""

    now = 10**15

    def __call__(self):
        return self.now


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


def test_the_first_batch_counts_for_nothing_runs():
    """Before the first step every wait is a wait."""
    waits, _ = simulate([70], step=1)
    assert waits == [70]
