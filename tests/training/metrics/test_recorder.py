"""The recorder is a step late where devices compute, and its clock leaves pauses out."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.shape.footprint import training_flops_per_token
from pipeline.errors import InputError
from tests.training import tiny
from training.metrics.metrics_log import MEASURED
from training.metrics.recorder import AVERAGED_STEPS, PeakMemory, Recorder, Throughput, Updates
from training.metrics.stopwatch import Stopwatch

THROUGHPUT = Throughput(tokens=1000, flops=(3e6, 4e6), peak=1e10)


class Clock:
    """A clock that a test moves, in seconds, and a stopwatch that runs by it."""

    now = 100.0

    def __init__(self):
        self.watch = Stopwatch("step", lambda: round(self.now * 1e9))

    def wait(self, seconds):
        """Wait for a batch while no step runs."""
        self.now += seconds
        self.watch.count_as("data_wait", round(seconds * 1e9))


class Array(float):
    """A number that a device has computed or not."""

    def __new__(cls, value, ready=False):
        made = super().__new__(cls, value)
        made.is_ready = lambda: ready
        return made


def metrics(loss, skipped=0.0, ready=False):
    return {"loss": Array(loss, ready), "skipped": Array(skipped, ready)}


def test_a_row_is_written_at_once_where_a_step_is_over():
    """So on CPUs, which compute a step when it is called."""
    clock, rows = Clock(), []
    recorder = Recorder(rows.append, clock.watch, THROUGHPUT, 3)
    for step, seconds in ((1, 2.0), (2, 3.0)):
        clock.wait(0.5)
        clock.now += seconds - 0.5
        recorder.push(step, metrics(4.0, ready=True))
        assert {"step": step, "seconds": seconds, "data_wait": 0.5}.items() <= rows[-1].items()
    recorder.drain()
    assert len(rows) == 2


def test_rows_come_one_step_late_and_are_complete():
    """Pushing step k writes the row of step k-1; draining writes the last, once."""
    clock, rows = Clock(), []
    recorder = Recorder(rows.append, clock.watch, THROUGHPUT, 3)
    clock.wait(0.25)
    recorder.push(1, metrics(4.0))
    assert rows == []
    clock.now += 1.25
    clock.wait(0.5)
    recorder.push(2, metrics(3.0))
    assert rows == [
        {
            "step": 1,
            "loss": 4.0,
            "skipped": 0.0,
            "seconds": 2.0,
            "data_wait": 0.75,
            "tokens_per_second": 500.0,
            "tokens_per_second_average": 500.0,
            "mfu": pytest.approx(500 * 3e6 / 1e10),
            "mfu_full": pytest.approx(500 * 4e6 / 1e10),
        }
    ]
    recorder.drain()
    recorder.drain()
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[1]["data_wait"] == 0


@given(
    st.lists(
        st.tuples(
            st.integers(0, 50),  # the wait for the batch
            st.integers(0, 50),  # the rest of the step
            st.sampled_from(["", "pause", "profile"]),
            st.booleans(),  # whether the step is over when it is pushed
        ),
        min_size=1,
    )
)
def test_a_wait_is_in_the_row_whose_seconds_it_is_part_of(steps):
    """No row waits longer than it takes, and together they wait as long as the loop did."""
    clock, rows = Clock(), []
    recorder = Recorder(rows.append, clock.watch, THROUGHPUT, 3)
    for step, (wait, computing, then, ready) in enumerate(steps, 1):
        clock.wait(wait)
        if then == "profile":  # comes between the batch and the step it is for
            recorder.drain()
            with clock.watch.during("other"):
                clock.now += 7
        clock.now += computing if ready else 0
        recorder.push(step, metrics(4.0, ready=ready))
        clock.now += 0 if ready else computing
        if then == "pause":
            recorder.drain()
            with clock.watch.during("checkpoint"):
                clock.now += 11
    recorder.drain()
    assert all(0 <= row["data_wait"] <= row["seconds"] for row in rows)
    assert sum(row["data_wait"] for row in rows) == sum(w for w, *_ in steps)
    assert sum(row["seconds"] for row in rows) == sum(w + c for w, c, *_ in steps)


def test_only_skipped_steps_in_a_row_stop_the_run():
    """Three skipped steps with a good one between go on; three in a row stop, naming the step."""
    rows = []
    recorder = Recorder(rows.append, Stopwatch(), THROUGHPUT, 3)
    for step, skipped in enumerate([1, 2, 2, 3, 4], start=1):
        recorder.push(step, metrics(4.0, skipped))
    recorder.push(6, metrics(4.0, 5))
    with pytest.raises(InputError, match=r"step 6.*3 steps in a row"):
        recorder.drain()
    assert len(rows) == 6


def test_time_of_steps_that_were_not_applied_is_not_useful():
    """Their seconds are in their rows, and in the bucket "skipped" instead of "step"."""
    clock, rows = Clock(), []
    recorder = Recorder(rows.append, clock.watch, THROUGHPUT, 9)
    for step, skipped in enumerate([0, 1, 1, 2], start=1):
        clock.wait(0.5)
        recorder.push(step, metrics(4.0, skipped))
        clock.now += 2.0**step
        recorder.drain()
    assert [row["seconds"] for row in rows] == [2.5, 4.5, 8.5, 16.5]
    spent = clock.watch.seconds()
    assert (spent["step"], spent["skipped"], spent["data_wait"]) == (10.0, 20.0, 2.0)
    assert recorder.updates == Updates(skipped=2, in_a_row=1, applied=2)


def test_batches_without_a_counted_token_have_no_loss_and_are_no_divergence():
    """Their loss is NaN; they neither lengthen nor end a series of steps that were not finite."""
    rows = []
    recorder = Recorder(rows.append, Stopwatch(), THROUGHPUT, 3)
    tokens, skipped = [0, 0, 0, 0, 9, 0, 9, 0, 9], range(1, 10)
    each = [
        metrics(0.0, s, True) | {"tokens": Array(t, True)}
        for s, t in zip(skipped, tokens, strict=True)
    ]
    for step, values in enumerate(each[:-1], start=1):
        recorder.push(step, values)
    with pytest.raises(InputError, match=r"step 9.*3 steps in a row"):
        recorder.push(9, each[-1])
    assert [bool(np.isnan(row["loss"])) for row in rows] == [count == 0 for count in tokens]
    assert recorder.updates == Updates(skipped=9, in_a_row=3, applied=0)


def test_tokens_that_do_not_count_are_padding():
    """4 rows of 250 positions make 996 predictions; 900 counted, so 96 were of padding."""
    clock, rows = Clock(), []
    padded = Throughput(tokens=1000, flops=(1.0, 1.0), peak=None, rows=4)
    recorder = Recorder(rows.append, clock.watch, padded, 3)
    recorder.push(1, metrics(4.0) | {"tokens": Array(900)})
    clock.now += 2.0
    recorder.drain()
    assert (rows[0]["tokens"], rows[0]["padded"]) == (900, 96)
    assert rows[0]["useful_tokens_per_second"] == 450.0


def test_the_average_is_of_the_last_steps_together():
    """Positions over seconds, not the mean of rates, over the last 50 steps."""
    clock, rows = Clock(), []
    recorder = Recorder(rows.append, clock.watch, THROUGHPUT, 3)
    times = [1.0 + (step % 7) for step in range(AVERAGED_STEPS + 20)]
    for step, seconds in enumerate(times, 1):
        recorder.push(step, metrics(4.0))
        clock.now += seconds
        recorder.drain()
        recent = times[max(0, step - AVERAGED_STEPS) : step]
        expected = 1000 * len(recent) / sum(recent)
        assert rows[-1]["tokens_per_second_average"] == pytest.approx(expected)


def test_a_new_throughput_counts_from_the_next_step_on():
    """The step that is still being computed keeps the size of its own batch."""
    clock, rows = Clock(), []
    recorder = Recorder(rows.append, clock.watch, THROUGHPUT, 3)
    recorder.push(1, metrics(4.0))
    recorder.throughput = Throughput(tokens=4000, flops=(3e6, 4e6), peak=1e10)
    clock.now += 1.0
    recorder.push(2, metrics(4.0))
    clock.now += 1.0
    recorder.drain()
    assert [row["tokens_per_second"] for row in rows] == [1000.0, 4000.0]


def test_a_row_has_the_memory_and_nothing_that_is_not_said_to_be_measured():
    """Columns that differ from run to run are listed, so that runs can be compared by the rest."""
    rows = []
    recorder = Recorder(rows.append, Stopwatch(), THROUGHPUT, 3, memory=lambda: 7)
    recorder.push(1, metrics(4.0))
    recorder.drain()
    assert rows[0]["memory_bytes"] == 7
    assert set(rows[0]) - MEASURED == {"step", "loss", "skipped"}


@given(
    skips=st.lists(st.booleans(), min_size=1, max_size=12), most=st.integers(1, 4), data=st.data()
)
def test_an_interruption_does_not_begin_the_count_of_skipped_steps_anew(skips, most, data):
    """A run stops at the same step whether it was resumed on the way or not."""
    totals = np.cumsum(skips).tolist()
    in_a_row, want = 0, None
    for step, skipped in enumerate(skips, 1):
        in_a_row = in_a_row + 1 if skipped else 0
        if in_a_row == most:
            want = step
            break
    at = data.draw(st.integers(0, (want or len(skips) + 1) - 1))
    recorder, stopped = Recorder([].append, Stopwatch(), THROUGHPUT, most), None
    for step in range(1, len(skips) + 1):
        if step == at + 1:  # a checkpoint holds what the next attempt's recorder begins with
            saved = Updates(*json.loads(json.dumps(recorder.updates)))
            recorder = Recorder([].append, Stopwatch(), THROUGHPUT, most, updates=saved)
        try:
            recorder.push(step, metrics(4.0, float(totals[step - 1]), ready=True))
        except InputError:
            stopped = step
            break
    assert stopped == want


def test_throughput_knows_peaks_of_tpus_only():
    """On a CPU a row has no MFU; on a TPU both conventions, and HFU if FLOPs are counted."""
    cpu = Throughput.of(tiny.MODEL, 8, 32, "cpu", 4)
    assert dataclasses.replace(cpu, executed=3e9).row(0.5) == {"tokens_per_second": 512.0}
    tpu = Throughput.of(tiny.MODEL, 8, 32, "TPU v6 lite", 4)
    row, peak = tpu.row(0.5), 4 * 918e12
    causal = training_flops_per_token(tiny.MODEL, 32, causal=True)
    assert row["mfu"] == pytest.approx(512 * causal / peak)
    assert row["mfu"] < row["mfu_full"]
    assert "hfu" not in row
    counted = dataclasses.replace(tpu, executed=3e9)
    assert counted.row(2.0)["hfu"] == pytest.approx(3e9 / 2 / peak)


class Device:
    """A device that tells of its memory."""

    def __init__(self, peak):
        self.peak, self.asked = peak, 0

    def memory_stats(self):
        self.asked += 1
        return self.peak and {"peak_bytes_in_use": self.peak, "bytes_in_use": 1}


def test_memory_is_that_of_the_fullest_device_and_asked_for_now_and_then():
    """The highest peak; the devices are asked once a second, however many rows there are."""
    clock = Clock()
    devices = [Device(3 << 30), Device(5 << 30)]
    memory = PeakMemory(devices, lambda: clock.now)
    assert [memory() for _ in range(100)] == [5 << 30] * 100
    assert devices[0].asked == 1
    clock.now += 1.5
    memory()
    assert devices[0].asked == 2


def test_where_devices_do_not_tell_the_process_does():
    """A CPU has no statistics: at least what this process has now, in bytes."""
    block = bytearray(64 << 20)
    found = PeakMemory([Device(None)])()
    assert found is not None
    assert len(block) < found < 1 << 42
