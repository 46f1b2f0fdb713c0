"""Values of Arrow columns: checked, converted to the types that documents have, and as bytes.

Arrow reads the offsets of an Arrow file and the text of any file without validating them, and then
a wrong offset ends the process. So batches of Arrow files pass `check_structure` first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data.read.unit import BATCH_BYTES, BATCH_ROWS, BYTES_PER_TOKEN, MOST_TEXT, SCORE

_BINARY = {
    pa.string(): pa.binary(),
    pa.large_string(): pa.large_binary(),
    pa.string_view(): pa.binary_view(),
}
_EXPANSION, _FRAME = 11, 64
_MOST_INTEGER = (1 << 63) - 1


def is_text(kind: pa.DataType) -> bool:
    """Whether a column of this type holds text, in any of Arrow's string encodings."""
    return (kind.value_type if pa.types.is_dictionary(kind) else kind) in _BINARY


def check_structure(batch: pa.RecordBatch) -> None:
    """Raise `pa.ArrowInvalid` for lengths, offsets or indices that point outside their buffers."""
    for column in batch.columns:
        _as_binary(column).validate(full=True)


def pieces(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """The batch cut to `BATCH_ROWS` rows and `BATCH_BYTES` decoded bytes, or to single rows."""
    ends = np.cumsum(sum(map(_sizes, batch.columns), np.zeros(batch.num_rows, np.int64)))
    begin = 0
    while begin < batch.num_rows:
        before = int(ends[begin - 1]) if begin else 0
        end = int(np.searchsorted(ends, before + BATCH_BYTES, side="right"))
        end = min(max(end, begin + 1), begin + BATCH_ROWS)
        yield batch.slice(begin, end - begin)
        begin = end


def joined(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Neighbouring batches joined up to `BATCH_ROWS` rows and `BATCH_BYTES` bytes."""
    held: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        more, length = batch.num_rows, batch.nbytes
        if held and (rows + more > BATCH_ROWS or size + length > BATCH_BYTES):
            yield pa.concat_batches(held) if len(held) > 1 else held[0]
            held, rows, size = [], 0, 0
        held.append(batch)
        rows, size = rows + more, size + length
    if held:
        yield pa.concat_batches(held) if len(held) > 1 else held[0]


def converted(field: str, name: str, column: pa.Array) -> tuple[pa.Array, dict[int, str]]:
    """(values as a document has them, what is wrong with a row by its index) of one column.

    A wrong value becomes null.
    """
    if field == SCORE:  # float64 may round an integer; that does not matter for selection
        return column.cast(pa.float64(), safe=False), {}
    if is_text(column.type):
        return _strings(name, column)
    if field == "id":
        return column.cast(pa.string()), {}
    if field != "token_count":
        return column, {}
    if not pa.types.is_uint64(column.type):
        return column.cast(pa.int64()), {}
    values = pc.fill_null(column, 0).to_numpy()
    wrong = {
        int(row): f"expected {name!r} below 2^63, found {values[row]}; correct it"
        for row in np.flatnonzero(values > _MOST_INTEGER)
    }
    null = column.is_null().to_numpy(zero_copy_only=False)
    null[list(wrong)] = True
    return pa.array(values.astype(np.int64), mask=null), wrong


def impossible_counts(batch: pa.RecordBatch, most_tokens: int) -> dict[int, str]:
    """What is wrong with a row's `token_count`, by row; nulls are not looked at.

    `most_tokens` is the upper bound for a document whose text was not read.
    """
    if "token_count" not in batch.schema.names:
        return {}
    counts = pc.fill_null(batch.column("token_count"), 0).to_numpy()
    most = np.full(len(counts), most_tokens)
    if "text" in batch.schema.names:
        sizes = pc.call_function("binary_length", [batch.column("text")]).cast(pa.int64())
        most = most_tokens_of(pc.fill_null(sizes, most_tokens).to_numpy())
    return {
        int(row): f"expected a 'token_count' of 0 to {most[row]:,}, found {counts[row]:,}; "
        "correct it"
        for row in np.flatnonzero((counts < 0) | (counts > most))
    }


def most_tokens_of(text_bytes: Any) -> Any:
    """Upper bound of the tokens of a text of `text_bytes` bytes.

    A token is at least one byte, NFKC normalisation makes at most eleven bytes of one, and a
    template may add a frame to a document.
    """
    return _EXPANSION * text_bytes + _FRAME


def _as_binary(column: pa.Array) -> pa.Array:
    """A column of text as bytes, without a look at its values; any other column as it is."""
    if pa.types.is_dictionary(column.type):  # raises for an index outside the dictionary
        values = _as_binary(column.dictionary)
        return pa.DictionaryArray.from_arrays(column.indices, values, ordered=column.type.ordered)
    return column.view(_BINARY[column.type]) if column.type in _BINARY else column


def _sizes(column: pa.Array) -> np.ndarray:
    """int64 [rows]: about the bytes of each value when it is decoded; of a null, any number."""
    kind, rows = column.type, len(column)
    if not is_text(kind) or not rows:
        return np.zeros(rows, np.int64)
    if pa.types.is_dictionary(kind):
        sizes = _sizes(column.dictionary)
        indices = pc.fill_null(column.indices, 0).to_numpy()
        return sizes[indices] if len(sizes) else np.zeros(rows, np.int64)
    buffer, begin = column.buffers()[1], column.offset
    if kind == pa.string_view():  # 16 bytes a view, of which the first four are its length
        return np.frombuffer(buffer, np.int32)[4 * begin :: 4][:rows].astype(np.int64)
    dtype = np.dtype(np.int64 if kind == pa.large_string() else np.int32)
    offsets = np.frombuffer(buffer, dtype, rows + 1, begin * dtype.itemsize)
    return np.diff(offsets.astype(np.int64))


def _strings(name: str, column: pa.Array) -> tuple[pa.Array, dict[int, str]]:
    """A column of text as strings, with null for a value that is not UTF-8 or too long."""
    if len(column) == 1 and column.null_count == 0 and _sizes(column)[0] > MOST_TEXT:
        return pa.nulls(1, pa.string()), {0: f"2 GiB or more of one text in {name!r}; cut it"}
    found = _as_binary(column)
    if pa.types.is_dictionary(found.type):
        found = found.dictionary_decode()
    found = found.cast(pa.binary())
    texts = found.view(pa.string())
    try:
        texts.validate(full=True)
        return texts, {}
    except pa.ArrowInvalid:
        pass
    values, wrong = found.to_pylist(), dict[int, str]()
    for row, value in enumerate(values):
        try:
            (value or b"").decode("utf-8")
        except UnicodeDecodeError as error:
            wrong[row] = (
                f"{name!r} is not UTF-8 (byte {error.start:,}); decode it when it is written"
            )
            values[row] = None
    return pa.array(values, pa.binary()).view(pa.string()), wrong


def text_offsets(texts: pa.Array) -> np.ndarray:
    """int64[texts + 1]: byte offsets of a string or large_string array's texts in its buffer."""
    buffer = texts.buffers()[1]
    if buffer is None or not len(texts):
        return np.zeros(len(texts) + 1, np.int64)
    dtype = np.dtype(np.int64 if pa.types.is_large_string(texts.type) else np.int32)
    offsets = np.frombuffer(buffer, dtype, len(texts) + 1, texts.offset * dtype.itemsize)
    return offsets.astype(np.int64)


def neighbours(offsets: np.ndarray, most: int) -> Iterator[tuple[int, int]]:
    """Ranges of texts of at most `most` bytes together, by their offsets; a longer one is alone."""
    begin = 0
    while begin < len(offsets) - 1:
        end = int(np.searchsorted(offsets, offsets[begin] + most, side="right")) - 1
        end = min(max(end, begin + 1), len(offsets) - 1)
        yield begin, end
        begin = end


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
    """An id for each text: its BLAKE2b-128 in hexadecimal; equal texts are in the same split."""
    names = [hashlib.blake2b(t, digest_size=16).hexdigest() for t in utf8_slices(texts)]
    return pa.array(names, pa.string())


def count_by_length(texts: pa.Array) -> pa.Array:
    """int64: estimated token count, ceil(UTF-8 bytes / 4), of each text; 0 for a null."""
    filled = pc.call_function("binary_length", [pc.fill_null(texts, "")])
    counts = -(-filled.to_numpy(zero_copy_only=False).astype(np.int64) // BYTES_PER_TOKEN)
    return pa.array(counts, pa.int64())
