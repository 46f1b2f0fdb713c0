"""Arrow strings as bytes, ids for documents without one, and estimated token counts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data.read.unit import BYTES_PER_TOKEN

_ID_BYTES = 16


def text_offsets(texts: pa.Array) -> np.ndarray:
    """int64[texts + 1]: byte offsets of a string or large_string array's texts in its buffer."""
    buffer = texts.buffers()[1]
    if buffer is None or not len(texts):
        return np.zeros(len(texts) + 1, np.int64)
    dtype = np.dtype(np.int64 if pa.types.is_large_string(texts.type) else np.int32)
    offsets = np.frombuffer(buffer, dtype, len(texts) + 1, texts.offset * dtype.itemsize)
    return offsets.astype(np.int64)


def text_bytes(texts: pa.Array) -> bytes:
    """The concatenated UTF-8 of all texts of a string or large_string array."""
    buffer = texts.buffers()[2]
    first, last = text_offsets(texts)[[0, -1]].tolist()
    return b"" if buffer is None else buffer.slice(first, last - first).to_pybytes()


def utf8_slices(texts: pa.Array) -> Iterator[bytes]:
    """The UTF-8 bytes of each value of a string array without nulls."""
    # Slicing bytes is faster than creating views.
    found, offsets = text_bytes(texts), text_offsets(texts)
    for start, end in pairwise((offsets - offsets[0]).tolist()):
        yield found[start:end]


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
