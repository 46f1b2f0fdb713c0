"""The checkpoint bench prints its lines."""

import json
import sys

import pytest

from tests.bench import checkpoint


@pytest.mark.slow
def test_lines(tmp_path, capsys):
    """Limits, ours, and Orbax where it is installed; nothing is left on the disk."""
    peers = ["--peers-python", sys.executable]
    arguments = ["--work", str(tmp_path), "--model", "bytes_tiny", "--repeat", "1", *peers]
    assert checkpoint.main(arguments) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    by_name = {line["measure"]: line for line in lines}
    assert {"limits", "ours", "orbax"} <= by_name.keys()
    assert by_name["limits"]["mib"] > 0
    assert by_name["ours"]["blocking_s_min"] >= 0
    assert by_name["ours"]["stored_mib"] >= by_name["limits"]["mib"]
    assert list(tmp_path.iterdir()) == []


def test_a_peer_that_is_absent_is_said(tmp_path, capsys):
    """A line says so, and the bench goes on."""
    assert checkpoint.main(["--work", str(tmp_path), "--model", "tiny", "--only", "orbax"]) == 0
    (line,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert line == {"measure": "orbax", "absent": "no environment was given"}
