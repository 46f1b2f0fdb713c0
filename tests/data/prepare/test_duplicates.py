"""Keys of documents: of which values there are any, and the shares of a file of them."""

from __future__ import annotations

import datetime

import numpy as np
import pyarrow as pa
import pytest

from data.prepare.comparison import Comparison
from data.prepare.duplicates import _keys, read_band, write_bands
from pipeline.errors import InputError

BY = Comparison(None, "column", {"train": 1, "test": 0}, across=True)


@pytest.mark.parametrize(
    "values",
    [["a", "b", "a"], [1, 2, 1], [0.5, 1.5, 0.5], [datetime.date(2026, 1, n) for n in (1, 2, 1)]],
)
def test_equal_values_have_equal_keys(values):
    keys = _keys(pa.array([None, *values]), "train", BY)
    assert keys.shape == (3, 1, 2)
    assert (keys[0] == keys[2]).all()
    assert (keys[0] != keys[1]).all()


def test_keys_of_two_splits_are_equal_only_if_they_are_compared():
    values = pa.array(["a", "b"])
    apart = BY._replace(across=False)
    assert np.array_equal(_keys(values, "train", BY), _keys(values, "test", BY))
    assert (_keys(values, "train", apart) != _keys(values, "test", apart)).all()


def test_lists_are_refused():
    with pytest.raises(InputError, match=r"by='column': expected a column of text.*found list"):
        _keys(pa.array([[1], [2]]), "train", BY)


@pytest.mark.parametrize(("documents", "bands", "words"), [(0, 2, 1), (1, 1, 2), (700, 3, 2)])
@pytest.mark.parametrize("shares", [1, 4, 256])
def test_shares_divide_every_band(tmp_path, documents, bands, words, shares):
    numbers = np.random.default_rng(documents)
    keys = numbers.integers(0, 1 << 63, (documents, bands, words)).astype(np.uint64) << np.uint64(1)
    rows = np.sort(numbers.choice(10_000, documents, replace=False))
    url = str(tmp_path / "bands")
    write_bands(url, keys, rows)
    for band in range(bands):
        found = {}
        for share in range(shares):
            part, places = read_band(url, band, bands, words, share, shares)
            assert (
                (part[:, 0] >> np.uint64(56)) * np.uint64(shares) // np.uint64(256) == share
            ).all()
            found |= dict(zip(places.tolist(), part.tolist(), strict=True))
        assert found == dict(zip(rows.tolist(), keys[:, band].tolist(), strict=True))
