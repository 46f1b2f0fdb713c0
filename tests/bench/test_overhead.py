"""The bench of overheads measures every part and the whole; no figure is asserted."""

from __future__ import annotations

import json

import pytest

from tests.bench import overhead


@pytest.mark.slow
def test_a_short_measurement_has_a_line_for_every_part(capsys):
    """Two rounds of three steps of 2 ms."""
    overhead.main(["--rounds", "2", "--steps", "3", "--step-ms", "2"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["parts"] for line in lines] == [
        ["nothing"],
        *([part] for part in overhead.PARTS if part != "feed"),
        ["loader", "feed"],
        list(overhead.PARTS),
    ]
    nothing, *_, everything = lines
    assert nothing["main_ms_over_nothing"] == 0
    assert everything["rounds"] == 2
    assert everything["cpu_ms"] > 0
