"""The bench of splash's tiles prints what it promises."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")
def test_a_kernel_and_its_rows():
    """One line for the kernel, one for each row length that its tiles divide."""
    command = [sys.executable, "-m", "tests.bench.splash_blocks", "--head-size", "64"]
    command += [
        "--kernel",
        "forward",
        "--tile",
        "512x512x512",
        "--position",
        "2048",
        "2176",
        "4608",
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ), check=True)
    kernel, *rows = (json.loads(line) for line in done.stdout.splitlines())
    assert kernel["measured"] == "kernel"
    assert kernel["compiles"]
    assert 0 < kernel["bundles"] < 10_000
    assert [row["position"] for row in rows] == [2048, 4608]
    assert [row["visited"] for row in rows] == [4 * 5 // 2, 9 * 10 // 2]
    assert all(row["cycles"] > row["visited"] * kernel["bundles"] for row in rows)
