"""`ponente launch --on local`: a head and the hosts of two slices on this machine, as processes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from pipeline.pages.record import runs
from tests.pipeline.launch import pod_toy

pytestmark = pytest.mark.slow

LAUNCH = [sys.executable, "-m", "steps.cli", "launch", pod_toy.__file__, "--on", "local"]


def test_imitated_slices_join_run_and_end(tmp_path):
    """One process on each host, numbered slice by slice, with its host's chips.

    Each knows how many slices there are and which is its own, as libtpu reads it.
    """
    directory = tmp_path / "processes"
    directory.mkdir()
    store = str(tmp_path / "store")
    done = subprocess.run(
        [*LAUNCH, "--hardware", "2xv4-16", "--directory", str(directory), "--prefix", store],
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


def wait_for(seen: Callable[[], bool], launch: subprocess.Popen[bytes], log: Path) -> None:
    """Return once something is seen, while the launch lasts."""
    deadline = time.monotonic() + 200
    while not seen():
        assert launch.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.2)


def test_a_host_that_reboots_joins_again_within_a_minute_and_the_run_ends(tmp_path):
    """All its processes are killed while the gang works; its number is its own when it returns."""
    directory, log = tmp_path / "processes", tmp_path / "log"
    directory.mkdir()
    store = str(tmp_path / "store")
    flags = ["--hardware", "v4-16", "--directory", str(directory), "--prefix", store]
    with log.open("wb") as file:
        launch = subprocess.Popen(
            [*LAUNCH, *flags, "--stay", "True"],
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": os.getcwd()},
        )
    try:
        wait_for(lambda: len(list(directory.iterdir())) == 2, launch, log)
        (host,) = (
            process
            for process in psutil.Process(launch.pid).children()
            if process.cmdline()[-4:] == ["--worker-id", "1", "--slice-id", "0"]
        )
        for process in [host, *host.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        wait_for(lambda: log.read_text().count("host 1 of 2 joined") == 2, launch, log)
        directory.with_name("go").touch()
        assert launch.wait(200) == 0, log.read_text()[-3000:]
    finally:
        launch.terminate()
        launch.wait(100)
    assert [record.outcome for record in runs(store)] == ["ok"]
