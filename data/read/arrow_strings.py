"""Arrow strings as bytes, ids for documents without one, and estimated token counts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data.read.unit import BYTES_PER_TOKEN

_ID_BYTES = 16


def is_text(kind: pa.DataType) -> bool:
    """Whether a column of this type holds text, in any of Arrow's string encodings."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    checks = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return any(check(kind) for check in checks)


def utf8_slices(array: pa.Array) -> Iterator[bytes]:
    """The UTF-8 bytes of each value of a string array without nulls."""
    if not len(array):
        return
    _, offsets, data = array.buffers()
    edges = np.frombuffer(offsets, np.int32)[array.offset : array.offset + len(array) + 1]
    # Slicing bytes is faster than creating views. The array may be a slice of a larger buffer.
    start, base = 0, int(edges[0])
    found = data.slice(base, int(edges[-1]) - base).to_pybytes() if data is not None else b""
    for end in (edges[1:] - base).tolist():
        yield found[start:end]
        start = end


def made_ids(texts: pa.Array) -> pa.Array:
    """An id for each text: its BLAKE2b-128 in hexadecimal, so equal texts have equal ids.

    Equal texts therefore have one place in the sample and are in the same split.
    """
    blake2b = hashlib.blake2b
    names = [blake2b(t, digest_size=_ID_BYTES).hexdigest() for t in utf8_slices(texts)]
    return pa.array(names, pa.string())


def count_by_length(texts: pa.Array) -> pa.Array:
    """int64: estimated token count, ceil(UTF-8 bytes / 4), of each text; 0 for a null."""
    filled = pc.call_function("binary_length", [pc.fill_null(texts, "")])
    counts = -(-filled.to_numpy(zero_copy_only=False).astype(np.int64) // BYTES_PER_TOKEN)
    return pa.array(counts, pa.int64())
