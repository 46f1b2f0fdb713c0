"""What a plan says stays readable, and affordable, in a graph where changes meet again."""

from __future__ import annotations

import pytest

from pipeline import Experiment
from tests.bench import engine_graphs
from tests.bench.engine_steps import build


def test_a_reason_does_not_repeat_the_reasons_behind_it(tmp_path, monkeypatch, capsys):
    """Twelve layers of two steps, each reading both of the layer before; the first one changes.

    The cause reaches the last layer by 2^10 paths and more, and is to be named, not listed.
    """
    monkeypatch.setitem(engine_graphs.SHAPES, "24", (12, 2))

    def command(verb: str, graph: str) -> list[str]:
        arguments = [verb, "--prefix", str(tmp_path), "--executor", "inline"]
        with pytest.raises(SystemExit) as stop:
            Experiment(build).main([*arguments, "--graph", graph])
        assert stop.value.code == 0
        return capsys.readouterr().out.splitlines()

    command("run", "24")
    told = command("plan", "24" + engine_graphs.CHANGED)
    last = next(line for line in told if " step-011-000 " in line)
    assert "salt: 0 -> 1" in last
    assert max(len(line) for line in told) < 1_000
