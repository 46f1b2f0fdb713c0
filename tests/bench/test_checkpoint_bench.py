"""The checkpoint bench prints its lines."""

import json

import pytest

from tests.bench import checkpoint


@pytest.mark.slow
def test_lines(tmp_path, capsys):
    """Limits and ours; nothing is left on the disk."""
    arguments = ["--work", str(tmp_path), "--model", "bytes_tiny", "--repeat", "1"]
    assert checkpoint.main(arguments) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    by_name = {line["measure"]: line for line in lines}
    assert {"limits", "ours"} == by_name.keys()
    assert by_name["limits"]["mib"] > 0
    assert by_name["ours"]["blocking_s_min"] >= 0
    assert by_name["ours"]["stored_mib"] >= by_name["limits"]["mib"]
    assert list(tmp_path.iterdir()) == []
