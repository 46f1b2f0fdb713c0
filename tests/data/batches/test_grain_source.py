"""Rows by number, as Grain wants them, with Grain and without."""

import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from data.batches.grain_source import GrainSource
from tests.data.token_shards import rows_of, source, spec, write_shards

LENGTH = 32


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Two sources: their spec, and all their rows in lists."""
    root = tmp_path_factory.mktemp("sources")
    web, web_tokens = write_shards(root / "web", [3001, 49, 955])
    code, code_tokens = write_shards(root / "code", [500, 49], first=20_000)
    return spec(source(web), source(code, "code")), [
        *rows_of(web_tokens, LENGTH),
        *rows_of(code_tokens, LENGTH),
    ]


def test_items_are_the_rows(stored):
    """A sequence in Python's sense: length, items by number, iteration that ends."""
    made, rows = stored
    grain_source = GrainSource(made)
    assert len(grain_source) == len(rows)
    assert [row.tolist() for row in grain_source] == rows
    last = grain_source[np.int64(len(rows) - 1)]
    assert (last.dtype, last.shape) == (np.int32, (LENGTH,))
    assert last.tolist() == rows[-1]
    several = grain_source._getitems([5, 0, 5])
    assert [row.tolist() for row in several] == [rows[5], rows[0], rows[5]]
    for index in (-1, len(rows)):
        with pytest.raises(IndexError):
            grain_source[index]
    grain_source.close()


def test_it_travels_to_other_processes(stored):
    """A copy by pickle reads the same rows, though the original has files open."""
    made, rows = stored
    grain_source = GrainSource(made)
    grain_source[0]
    copy = pickle.loads(pickle.dumps(grain_source))  # noqa: S301 - what was just made
    assert copy[7].tolist() == rows[7]
    assert repr(copy) == repr(grain_source)


def test_its_text_depends_on_the_tokens_alone(tmp_path):
    """Grain compares it on restore: a moved cache has the same, another cache or length not."""
    moved = [write_shards(tmp_path / name, [3001, 49])[0] for name in ("a", "b")]
    other = write_shards(tmp_path / "c", [3001, 49], first=2)[0]
    texts = [repr(GrainSource(spec(source(shards)))) for shards in moved]
    assert texts[0] == texts[1]
    assert "rows=95" in texts[0]
    assert "sequence_length=32" in texts[0]
    assert repr(GrainSource(spec(source(other)))) != texts[0]
    assert repr(GrainSource(spec(source(moved[0]), length=33))) != texts[0]
    assert repr(GrainSource(spec(source(moved[0][::-1])))) != texts[0]


def test_grain_is_not_needed():
    """Importing the module loads no Grain."""
    code = "import sys, data.batches.grain_source; print('grain' in sys.modules)"
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root
    )
    assert done.stdout.strip() == "False"


def test_grain_reads_it(stored):
    """Shuffled, repeated and batched by Grain: each epoch has every row once."""
    grain = pytest.importorskip("grain")
    made, rows = stored
    grain_source = GrainSource(made)
    assert isinstance(grain_source, grain.sources.RandomAccessDataSource)
    data = grain.MapDataset.source(grain_source).seed(1).shuffle().repeat(2)
    found = [row.tolist() for row in data.to_iter_dataset(grain.ReadOptions(num_threads=2))]
    epochs = found[: len(rows)], found[len(rows) :]
    for epoch in epochs:
        assert sorted(epoch) == sorted(rows)
    assert epochs[0] != epochs[1]
    batch = grain.MapDataset.source(grain_source).batch(4)[1]
    assert batch.tolist() == rows[4:8]
