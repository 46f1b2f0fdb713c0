"""Two real processes of two devices each against one process of four."""

import json
import os
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

from tests.compilation import xla_flags
from tests.training import tiny
from training.checkpoint.restore import newest_sound

pytestmark = pytest.mark.slow


def free_port() -> int:
    """A TCP port nobody listens on right now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run_processes(root, count, devices, *extra, module="tests.training.worker"):
    """Reports of `count` worker processes that ran together."""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": xla_flags(devices),
    }
    port = str(free_port())
    outputs = [os.path.join(root, f"report-{count}-{i}.json") for i in range(count)]
    worker = [sys.executable, "-m", module, root]
    processes = [
        subprocess.Popen(
            [*worker, output, str(count), str(i), port, *extra],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i, output in enumerate(outputs)
    ]
    try:
        logs = [process.communicate(timeout=180)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, log in zip(processes, logs, strict=True):
        assert process.returncode == 0, log[-3000:]
    reports = []
    for output in outputs:
        with open(output) as file:
            reports.append(json.load(file))
    return reports


@pytest.fixture
def root(tmp_path):
    """A folder with the tiny run's token shards."""
    tiny.write_data(str(tmp_path))
    return str(tmp_path)


LAYOUTS = {
    "fsdp": (2, 2, {"sharding": "fsdp", "group": 2}),
    "both over hosts": (4, 1, {"sharding": "zero1", "sequence": 2, "tensor": 2}),
}


@pytest.mark.slow
@pytest.mark.parametrize(("count", "devices", "layout"), LAYOUTS.values(), ids=LAYOUTS)
def test_processes_are_one_program(root, count, devices, layout):
    """Processes train as one with as many devices, and their checkpoint restores in one.

    Also where a row's positions or a layer's heads are divided among processes, which then read
    the same rows.
    """
    parallel = json.dumps(layout)
    (one,) = run_processes(root, 1, count * devices, parallel)
    first, *others = run_processes(root, count, devices, parallel)
    for report in (first, *others):
        assert report["steps"] == 6
        assert report["compilations"] == 1
        for got, want in zip(report["rows"], one["rows"], strict=True):
            assert got.keys() == want.keys()
            np.testing.assert_allclose(got["loss"], want["loss"], rtol=0, atol=1e-5)
            assert (got["step"], got["tokens"]) == (want["step"], want["tokens"])
        for got, want in zip(report["evaluations"], one["evaluations"], strict=True):
            assert (got["step"], got["tokens"], got["bytes"]) == (
                *(want["step"], want["tokens"], want["bytes"]),
            )
            assert got["loss"] == pytest.approx(want["loss"], abs=1e-5)
    assert all(report["rows"] == first["rows"] for report in others)
    assert [step for step, _ in first["committed"]] == [1, 2, 3, 4, 5, 6]
    assert all(report["committed"] == [] for report in others)
    restored = [
        newest_sound([tuple(report["committed"][-1])], tiny.program(1).abstract)[2]
        for report in (one, first)
    ]
    for a, b in zip(*map(jax.tree.leaves, restored), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-4)
