"""`ponente launch --on local`: a head and the hosts of a slice on this machine, as processes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pipeline.pages.record import runs
from tests.pipeline.launch import pod_toy

pytestmark = pytest.mark.slow


def test_an_imitated_slice_joins_runs_and_ends(tmp_path):
    """One process on each host, numbered as the slice numbers them, with its host's chips."""
    directory = tmp_path / "processes"
    directory.mkdir()
    store = str(tmp_path / "store")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "steps.cli", "launch", pod_toy.__file__, "--on", "local"),
            *("--hardware", "v4-16", "--directory", str(directory), "--prefix", store),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "all 2 hosts joined" in done.stdout
    found = [(directory / str(index)).read_text().split() for index in range(2)]
    assert [words[:3] for words in found] == [["2", str(index), "4"] for index in range(2)]
    assert len({node for *_, node in found}) == 2
    assert [record.outcome for record in runs(store)] == ["ok"]
