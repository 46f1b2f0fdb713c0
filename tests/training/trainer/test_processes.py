"""Two real processes of two devices each against one process of four."""

import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from tests.compilation import xla_flags
from tests.faults.trainer import recorded
from tests.faults.trainers import Trainers, finish, free_port
from tests.training import tiny
from training.checkpoint.restore import newest_sound

pytestmark = pytest.mark.slow


def run_processes(root, count, devices, *extra, module):
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


LAYOUTS = {
    "fsdp": (2, 2, {"sharding": "fsdp", "group": 2}),
    "both over hosts": (4, 1, {"sharding": "zero1", "sequence": 2, "tensor": 2}),
}


@pytest.mark.parametrize(("count", "devices", "layout"), LAYOUTS.values(), ids=LAYOUTS)
def test_processes_are_one_program(data, tmp_path, count, devices, layout):
    """Processes train as one with as many devices, and their checkpoint restores in one.

    Also where a row's positions or a layer's heads are divided among processes, which then read
    the same rows.
    """
    arguments = ("--steps", "6", "--every", "1", "--parallel", json.dumps(layout))
    want = finish(data, tmp_path / "one", *arguments, devices=count * devices)
    run = tmp_path / "several"
    with Trainers(data, run, *arguments, processes=count, devices=devices) as trainers:
        assert set(trainers.ends()) == {0}, trainers.tail()
        reports = [trainers.report(index) for index in range(count)]
    assert {(each["steps"], each["compilations"]) for each in reports} == {(6, 1)}
    tables = {"rows": ("step", "tokens"), "evaluations": ("step", "tokens", "bytes")}
    for table, columns in tables.items():
        for got, one in zip(reports[0][table], want[table], strict=True):
            assert got.keys() == one.keys()
            assert [got[name] for name in columns] == [one[name] for name in columns]
            assert got["loss"] == pytest.approx(one["loss"], abs=1e-5)
    found = [recorded(tmp_path / name) for name in ("one", "several")]
    assert [step for step, _ in found[1]] == [1, 2, 3, 4, 5, 6]
    restored = [newest_sound(each[-1:], tiny.program(1).abstract)[2] for each in found]
    for a, b in zip(*map(jax.tree.leaves, restored), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-4)
