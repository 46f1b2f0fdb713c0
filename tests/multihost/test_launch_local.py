"""`ponente launch --on local`: a head and the hosts of two slices on this machine, as processes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pipeline.pages.record import runs
from tests.pipeline.launch import pod_toy

pytestmark = pytest.mark.slow


def test_imitated_slices_join_run_and_end(tmp_path):
    """One process on each host, numbered slice by slice, with its host's chips.

    Each knows how many slices there are and which is its own, as libtpu reads it.
    """
    directory = tmp_path / "processes"
    directory.mkdir()
    store = str(tmp_path / "store")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "steps.cli", "launch", pod_toy.__file__, "--on", "local"),
            *("--hardware", "2xv4-16", "--directory", str(directory), "--prefix", store),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "all 4 hosts joined" in done.stdout
    found = [(directory / str(index)).read_text().split() for index in range(4)]
    places = [["4", worker, "2", number, "4"] for number in "01" for worker in "01"]
    assert [words[:5] for words in found] == places
    slices = [name for *_, name, _ in found]
    assert slices[0] == slices[1] != slices[2] == slices[3]
    assert len({node for *_, node in found}) == 4
    assert [record.outcome for record in runs(store)] == ["ok"]
