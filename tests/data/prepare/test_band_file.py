"""The shares of a band file are a division of its keys by their first byte."""

from __future__ import annotations

import numpy as np
import pytest

from data.prepare.band_file import read_band, write_bands


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
