"""Values that cannot be compared are refused, and values of any other type are compared."""

from __future__ import annotations

import datetime

import numpy as np
import pyarrow as pa
import pytest

from data.prepare.comparison import Comparison
from data.prepare.duplicates import _keys
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
