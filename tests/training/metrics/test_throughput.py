"""Rates and utilisations say what they count, and memory is the fullest device's."""

import pytest

from models.shape.footprint import training_flops_per_token
from tests.training import tiny
from training.metrics.recorder import PeakMemory, Throughput


class Clock:
    """A clock that a test moves."""

    now = 100.0

    def __call__(self):
        return self.now


def test_throughput_knows_peaks_of_tpus_only():
    """On a CPU a row has no MFU; on a TPU it has both conventions, the causal one smaller."""
    cpu = Throughput.of(tiny.MODEL, 8, 32, "cpu", 4)
    assert cpu.row(0.5) == {"tokens_per_second": 512.0}
    tpu = Throughput.of(tiny.MODEL, 8, 32, "TPU v6 lite", 4)
    row = tpu.row(0.5)
    causal = training_flops_per_token(tiny.MODEL, 32, causal=True)
    assert row["mfu"] == pytest.approx(512 * causal / (4 * 918e12))
    assert row["mfu"] < row["mfu_full"]


def test_hfu_counts_what_is_executed_and_mfu_what_the_model_asks_for():
    """3e9 executed FLOPs in 2 s on a peak of 1e10; without a count or a peak there is no HFU."""
    counted = Throughput(tokens=1000, flops=(3e6, 4e6), peak=1e10, executed=3e9)
    assert counted.row(2.0)["hfu"] == pytest.approx(3e9 / 2 / 1e10)
    assert "hfu" not in Throughput(tokens=1000, flops=(3e6, 4e6), peak=1e10).row(2.0)
    assert "hfu" not in Throughput(tokens=1, flops=(1, 1), peak=None, executed=3e9).row(1.0)


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
    memory = PeakMemory(devices, clock)
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
