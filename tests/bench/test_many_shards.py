"""The bench of many shards measures what it says: both readers read the same rows."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from data.cache.token_shard import TokenShard
from tests.bench import many_shards
from tests.bench.engine_systems import ROOT


def test_both_readers_read_the_rows_that_were_written(tmp_path):
    """Shards of the size asked for, and equal rows of each."""
    written = many_shards.write(tmp_path, 3, 3 * 5000)
    assert written["tokens"] == 3 * 5000
    shards = [TokenShard(*row) for row in json.loads((tmp_path / "shards.json").read_text())]
    chosen, begins = np.array([2, 0, 1, 2]), np.array([0, 2048, 2048, 2048])
    ours = many_shards.Ours(shards).read(chosen, begins)
    theirs = many_shards.TensorStore(shards).read(chosen, begins)
    assert np.array_equal(ours, theirs)
    assert len({row.tobytes() for row in ours}) == 4


@pytest.mark.slow
def test_every_line_is_a_measurement():
    """Versions, writing, and a row for each reader, without an error."""
    command = [sys.executable, "-m", "tests.bench.many_shards", "--shards", "4"]
    command += ["--tokens", "20000", "--seconds", "0.1", "--repeat", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["measured"] for row in rows] == ["versions", "write", "read", "read"]
    assert {row["reader"] for row in rows[2:]} == {"ours", "tensorstore"}
    assert all(row["tokens_per_cpu_s"] > 0 for row in rows[1:])
