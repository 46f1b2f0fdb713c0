"""The recorder is one step late, its clock leaves pauses out, and rows say what they mean."""

import jax.numpy as jnp
import pytest

from models.flops import training_flops_per_token
from pipeline.errors import InputError
from tests.training import tiny
from training.metrics import Recorder, Throughput

THROUGHPUT = Throughput(tokens=1000, flops=(3e6, 4e6), peak=1e10)


class Clock:
    """A clock that a test moves."""

    now = 100.0

    def __call__(self):
        return self.now


def metrics(loss, skipped=0.0):
    return {"loss": jnp.float32(loss), "skipped": jnp.float32(skipped)}


def test_rows_come_one_step_late_and_are_complete():
    """Pushing step k writes the row of step k-1; draining writes the last, once."""
    clock, rows, seen = Clock(), [], []
    recorder = Recorder(rows, THROUGHPUT, 3, seen.append, clock)
    recorder.push(1, metrics(4.0), 0.25)
    assert rows == []
    clock.now += 2.0
    recorder.push(2, metrics(3.0), 0.5)
    assert rows == [
        {
            "step": 1,
            "loss": 4.0,
            "skipped": 0.0,
            "seconds": 2.0,
            "data_wait": 0.25,
            "tokens_per_second": 500.0,
            "mfu": pytest.approx(500 * 3e6 / 1e10),
            "mfu_full": pytest.approx(500 * 4e6 / 1e10),
        }
    ]
    recorder.drain()
    recorder.drain()
    assert [row["step"] for row in rows] == [1, 2]
    assert seen == rows


def test_pauses_belong_to_no_row():
    """Time before restart_clock (an evaluation, say) is in no row's seconds."""
    clock, rows = Clock(), []
    recorder = Recorder(rows, THROUGHPUT, 3, None, clock)
    recorder.push(1, metrics(4.0), 0.0)
    clock.now += 1.0
    recorder.drain()
    clock.now += 50.0
    recorder.restart_clock()
    recorder.push(2, metrics(4.0), 0.0)
    clock.now += 3.0
    recorder.drain()
    assert [row["seconds"] for row in rows] == [1.0, 3.0]


def test_only_skipped_steps_in_a_row_stop_the_run():
    """Three skipped steps with a good one between go on; three in a row stop, naming the step."""
    rows = []
    recorder = Recorder(rows, THROUGHPUT, 3)
    for step, skipped in enumerate([1, 2, 2, 3, 4], start=1):
        recorder.push(step, metrics(4.0, skipped), 0.0)
    recorder.push(6, metrics(4.0, 5), 0.0)
    with pytest.raises(InputError, match=r"step 6.*3 steps in a row"):
        recorder.drain()
    assert len(rows) == 6


def test_a_resumed_recorder_counts_from_the_history():
    """Steps skipped before the resume are not counted again."""
    recorder = Recorder([{"step": 9, "skipped": 7.0}], THROUGHPUT, 1)
    recorder.push(10, metrics(4.0, 7), 0.0)
    recorder.drain()


def test_throughput_knows_peaks_of_tpus_only():
    """On a CPU a row has no MFU; on a TPU it has both conventions, the causal one smaller."""
    cpu = Throughput.of(tiny.MODEL, 8, 32, "cpu", 4)
    assert cpu.row(0.5) == {"tokens_per_second": 512.0}
    tpu = Throughput.of(tiny.MODEL, 8, 32, "TPU v6 lite", 4)
    row = tpu.row(0.5)
    causal = training_flops_per_token(tiny.MODEL, 32, causal=True)
    assert row["mfu"] == pytest.approx(512 * causal / (4 * 918e12))
    assert row["mfu"] < row["mfu_full"]
