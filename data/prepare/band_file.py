"""The keys of one item's documents in a file from which a share of one band can be read.

uint64 [bands, 257]: where in the file's records the keys with each first byte begin, and the end of
the band; then the records of each band (key and row), in the order of the keys' first bytes.
"""

from __future__ import annotations

import numpy as np

from pipeline.store import storage

SHARES = 256
"""Most shares of a band: one for each first byte of a key."""


def write_bands(url: str, keys: np.ndarray, rows: np.ndarray) -> None:
    """Write the keys (uint64 [documents, bands, words]) of some rows (int [documents])."""
    documents, bands, words = keys.shape
    ends = np.zeros((bands, SHARES + 1), "<u8")
    orders = []
    for band in range(bands):
        first = (keys[:, band, 0] >> np.uint64(56)).astype(np.uint8)
        orders.append(np.argsort(first, kind="stable"))
        ends[band] = band * documents
        ends[band, 1:] += np.cumsum(np.bincount(first, minlength=SHARES)).astype(np.uint64)
    with storage.open_write(url) as file:
        file.write(ends.tobytes())
        for band, order in enumerate(orders):
            records = np.empty(documents, _record(words))
            records["key"], records["row"] = keys[order, band], rows[order]
            file.write(records.tobytes())


def read_band(
    url: str, band: int, bands: int, words: int, share: int, shares: int
) -> tuple[np.ndarray, np.ndarray]:
    """(uint64 [documents, words] keys, uint32 [documents] rows) of one of a power of two shares."""
    record, width = _record(words), SHARES // shares
    table = 8 * (SHARES + 1)
    with storage.open_read(url) as file:
        file.seek(band * table + 8 * share * width)
        ends = np.frombuffer(file.read(8 * (width + 1)), "<u8")
        begin, end = int(ends[0]), int(ends[-1])
        file.seek(bands * table + begin * record.itemsize)
        found = np.frombuffer(file.read((end - begin) * record.itemsize), record)
    return found["key"].astype(np.uint64), found["row"].astype(np.uint32)


def _record(words: int) -> np.dtype:
    return np.dtype([("key", "<u8", (words,)), ("row", "<u4")])
