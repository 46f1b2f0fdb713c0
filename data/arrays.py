"""One array in one file, in NumPy's format and without pickle."""

from __future__ import annotations

import numpy as np

from pipeline.store import storage


def save_array(url: str, array: np.ndarray) -> None:
    with storage.open_write(url) as file:
        np.save(file, array, allow_pickle=False)


def load_array(url: str) -> np.ndarray:
    """The array that `save_array` wrote."""
    with storage.open_read(url) as file:
        return np.load(file, allow_pickle=False)
