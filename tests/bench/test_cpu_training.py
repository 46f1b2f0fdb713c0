"""The CPU training bench runs, on a model of a few numbers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.cpu_training_measure import WARM_UP, Clock, Options
from tests.compilation import xla_flags

ROOT = Path(__file__).parents[2]


def test_a_record_leaves_out_the_warm_up():
    """The rate is of the median step after ten, whatever the first ones took."""
    clock = Clock(Options(born=0.0, work="", vocab=7, steps=14, position=4, batch=5))
    slow = [10.0 * step for step in range(1, WARM_UP + 1)]
    clock.ends = [*slow, 101.0, 101.5, 102.0, 106.0]
    clock.worked = [*slow, 102.0, 104.0, 106.0, 108.0]
    clock.losses = [3.0] * 13 + [2.5]
    record = clock.record("x")
    assert record["first_step_s"] == 10.0
    assert record["tokens_per_second"] == round(20 / 0.75)
    assert record["best_tokens_per_second"] == round(20 / 0.5)
    assert record["tokens_per_cpu_second"] == round(20 / 2.0)
    assert (record["first_loss"], record["last_loss"], record["steps"]) == (3.0, 2.5, 14)


@pytest.mark.slow
def test_the_bench_prints_its_lines():
    """A run in a process of its own, and the medians."""
    command = [sys.executable, "-m", "tests.bench.cpu_training"]
    command += ["--vocab=64", "--steps=14", "--runs=1"]
    one = {**os.environ, "XLA_FLAGS": xla_flags(devices=1)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=one)
    assert done.returncode == 0, done.stderr
    run, medians = (json.loads(line) for line in done.stdout.splitlines())
    assert run["name"] == medians["name"] == "ponente"
    assert run["steps"] == 14
    assert 0 < run["import_s"] < run["first_step_s"]
    assert medians["tokens_per_second"] == run["tokens_per_second"] > 0
