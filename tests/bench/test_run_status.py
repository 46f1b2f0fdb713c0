"""The bench of `status` measures what it says: the layouts are of one run."""

from __future__ import annotations

import pytest

from tests.bench import run_status
from tests.bench.engine_systems import ROOT


@pytest.mark.slow
def test_a_merged_log_says_the_same_by_fewer_requests():
    """Of the same run, in the same store."""
    rows = list(run_status.rows([ROOT], 200))
    assert [row["layout"] for row in rows] == ["file", "parts", "merged"]
    assert len({row["said"] for row in rows}) == 1
    assert ": running, long.py" in rows[0]["said"]
    local, parts, merged = (row["requests"] for row in rows)
    assert local == 0 < merged < 40 < 400 < parts
