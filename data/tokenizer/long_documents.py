"""Encodes documents of any length in bounded memory, with the same ids as encoding them whole.

A back end gets about a mebibyte of text at a time, and a longer document in pieces. A piece ends at
a safe cut, where the tokenizer always splits: candidates, such as a space between two letters, are
tested with the tokenizer on the surrounding text. The pre-tokenizer must end a word at the cut, and
the ids of the two sides encoded separately must be those of both together; both with eight starts
of the surrounding text, because a split may depend on a count from the start of the text.

If no candidate is safe, the piece grows; a tokenizer that never splits gets the document whole, up
to 16 MiB, which takes a gigabyte of memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer

from data.read.values import neighbours, text_offsets
from data.tokenizer.backends import CheckedEncoder, Ids, OracleEncoder
from pipeline.errors import InputError

BATCH_BYTES = 1 << 20  # text that a back end gets at once; a longer document is cut
PIECE_BYTES = 1 << 18  # aimed-at size of a piece
MOST_BYTES = 1 << 24  # largest piece

_SEARCH_BYTES = 1 << 14  # size of the first stretch that is searched for a cut
_CANDIDATES = 4  # candidates of each kind that are tested in a stretch
_BEFORE, _AFTER = 256, 128  # bytes of text around a cut that are tested
_STARTS = 8
_SHOWN = 40
_KINDS = tuple(
    re.compile(pattern)
    for pattern in (
        rb"(?<=[A-Za-z])(?= [A-Za-z])",
        rb"(?<=[A-Za-z0-9\x80-\xff])(?=[!-/:-@\[-`{-~])",  # a word and its punctuation
        rb"(?<=\xe3\x80[\x81\x82])(?=[\xe3-\xe9])",  # ideographic comma and full stop
        rb"(?<=\n)(?=[A-Za-z])",
        rb"(?<=[A-Za-z])(?=[\s0-9])",
    )
)


def encode_documents(
    texts: Sequence[pa.Array], encoder: CheckedEncoder | OracleEncoder, tokenizer: Tokenizer
) -> Iterator[Ids]:
    """Ids of documents (string or large_string without nulls), in batches of whole documents."""
    for array in texts:
        offsets = text_offsets(array)
        for begin, end in neighbours(offsets, BATCH_BYTES):
            batch = array.slice(begin, end - begin)
            if offsets[end] - offsets[begin] > BATCH_BYTES:
                yield _encode_long(batch, encoder, tokenizer)
            else:
                yield encoder.encode(batch)


def cut_points(text: memoryview, tokenizer: Tokenizer, piece: int) -> list[int]:
    """Safe cuts of a text, excluding its ends: byte offsets, ascending, `piece` apart or more."""
    points: list[int] = []
    begin = 0
    while (cut := _next_cut(text, begin + piece, tokenizer)) is not None:
        points.append(cut)
        begin = cut
    return points


def is_safe_cut(text: memoryview, cut: int, tokenizer: Tokenizer) -> bool:
    """Whether `tokenizer` splits `text` at byte `cut`, as far as the surrounding text shows."""
    left = bytes(text[max(0, cut - _BEFORE) : cut]).decode("utf-8", "ignore")
    right = bytes(text[cut : cut + _AFTER]).decode("utf-8", "ignore")
    split = tokenizer.pre_tokenizer
    # White space alone does not show what a normalizer that strips it does to the text beyond.
    if split is None or not left.strip() or not right.strip():
        return False
    # Near its beginning the whole document before the cut is tested, so its start is known.
    starts = range(_STARTS) if cut > _BEFORE else range(1)
    lefts = [left[start:] for start in starts]
    for part in lefts:
        words = split.pre_tokenize_str(part + right)
        if not any(begin == len(part) for _, (begin, _) in words):
            return False
    whole = tokenizer.encode_batch_fast([p + right for p in lefts], add_special_tokens=False)
    apart = tokenizer.encode_batch_fast([*lefts, right], add_special_tokens=False)
    after = apart[-1].ids
    return all(w.ids == a.ids + after for w, a in zip(whole, apart[:-1], strict=True))


def _next_cut(text: memoryview, begin: int, tokenizer: Tokenizer) -> int | None:
    """The first safe cut from `begin` on that is not at the end of the text; None if none is found.

    Few candidates are tested, so a safe cut may be missed, which only makes a piece longer.
    """
    stretch = _SEARCH_BYTES
    while begin < len(text) - 1:
        part = bytes(text[begin - 1 : begin + stretch])
        for kind in _KINDS:
            for tried, match in enumerate(kind.finditer(part, 1, len(part) - 1)):
                if tried == _CANDIDATES:
                    break
                if is_safe_cut(text, begin - 1 + match.start(), tokenizer):
                    return begin - 1 + match.start()
        begin += stretch
        stretch *= 2  # bounds the candidates tested in a text without safe cuts
    return None


def _encode_long(
    document: pa.Array, encoder: CheckedEncoder | OracleEncoder, tokenizer: Tokenizer
) -> Ids:
    """Ids of one document, encoded in pieces."""
    offsets = text_offsets(document)
    begin, end = int(offsets[0]), int(offsets[-1])
    data = document.buffers()[2]
    text = memoryview(data)[begin:end]
    points = np.array([0, *cut_points(text, tokenizer, PIECE_BYTES), end - begin], np.int64) + begin
    if (longest := int(np.diff(points).max())) > MOST_BYTES:
        raise InputError(
            f"a document that begins with {bytes(text[:_SHOWN]).decode('utf-8', 'replace')!r} has "
            f"{longest:,} bytes in which the tokenizer never splits, which takes gigabytes of "
            f"memory; expected at most {MOST_BYTES:,}: break its lines, or leave it out of the "
            "source"
        )
    pieces = pa.LargeStringArray.from_buffers(len(points) - 1, pa.py_buffer(points), data)
    parts = [
        encoder.encode(pieces.slice(first, last - first))[0]
        for first, last in neighbours(text_offsets(pieces), BATCH_BYTES)
    ]
    ids = np.concatenate(parts)
    return ids, np.array([len(ids)], np.int64)
