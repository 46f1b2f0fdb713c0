"""MinHash signatures of texts, and the hashes of their bands.

The share of equal entries in two signatures estimates the Jaccard similarity s of two sets of
shingles (Broder 1997, "On the resemblance and containment of documents"). Two texts agree in all
rows of one of b bands of r rows with a probability of 1 - (1 - s^r)^b (Leskovec, Rajaraman and
Ullman, "Mining of Massive Datasets", section 3.4).

A shingle is some neighbouring words in lower case. A word is a run of letters, marks and digits of
at most `_LONGEST` bytes; in scripts without spaces every character is one. A text of fewer words is
one shingle, and a text of no words is compared as a whole.
"""

from __future__ import annotations

import functools
import hashlib
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data.prepare.words import finalised, mixed
from data.read.values import text_bytes, text_offsets
from data.select.document_hash import text_hash

_LONGEST = 64
_BLOCK_BYTES = 1 << 17  # text hashed at once, so that it stays in a core's cache
_BLOCK_SHINGLES = 1 << 14
_LARGEST = np.uint32((1 << 32) - 1)
_BASE = 0x9E3779B97F4A7C15  # of the polynomial hash: any odd number with an inverse modulo 2^64

# Of ASCII, letters and digits are words and bytes from 128 on are not looked at.
_TABLE = bytes(
    byte if byte >= 128 or chr(byte).isalnum() else ord(" ") for byte in bytes(range(256)).lower()
)
_NO_WORD = r"[^\x00-\x7f\pL\pM\pN]+"
_ALONE = r"([\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}])"


class _Words(NamedTuple):
    hashes: np.ndarray  # uint64 [words], of all texts
    first: np.ndarray  # int64 [texts + 1]: where the words of a text begin


def signatures(texts: pa.Array, ngram: int, permutations: int) -> np.ndarray:
    """uint32 [texts, permutations]: for each permutation of the hashes of shingles, the least.

    The texts have no nulls; the signature of one does not depend on the others.
    """
    shingles, first = _shingles(texts, ngram)
    multipliers = _numbers("multiplier", permutations).astype(np.uint32)
    offsets = _numbers("offset", permutations).astype(np.uint32)
    least = np.full((permutations, len(texts)), _LARGEST)
    for begin in range(0, len(shingles), _BLOCK_SHINGLES):
        block = shingles[begin : begin + _BLOCK_SHINGLES]
        # Every text has a shingle, so the texts of a block are neighbours without a gap.
        low = int(np.searchsorted(first, begin, side="right")) - 1
        high = int(np.searchsorted(first, begin + len(block), side="left"))
        starts = np.maximum(first[low:high] - begin, 0)
        permuted = np.empty_like(block)
        for row, multiplier, offset in zip(least[:, low:high], multipliers, offsets, strict=True):
            np.multiply(block, multiplier, out=permuted)
            np.add(permuted, offset, out=permuted)
            np.minimum(row, np.minimum.reduceat(permuted, starts), out=row)
    return np.ascontiguousarray(least.T)


def band_hashes(signatures: np.ndarray, bands: int) -> np.ndarray:
    """uint64 [texts, bands]: a hash of the neighbouring rows of each band.

    Of 1e9 texts, two have the same 64 bits by accident in one band with a probability of 0.03.
    """
    rows = signatures.reshape(len(signatures), bands, signatures.shape[1] // bands).astype(
        np.uint64
    )
    found = np.zeros(rows.shape[:2], np.uint64)
    for row in range(rows.shape[2]):
        found = mixed(found + rows[:, :, row])
    return found


def _shingles(texts: pa.Array, ngram: int) -> tuple[np.ndarray, np.ndarray]:
    """(uint32 [shingles], int64 [texts + 1]: where the shingles of a text begin)."""
    words = _words(texts)
    counts = np.diff(words.first)
    shingles = np.maximum(counts - ngram + 1, 1)
    first = np.concatenate([[0], np.cumsum(shingles)])
    begins = np.arange(first[-1]) + np.repeat(words.first[:-1] - first[:-1], shingles)
    found = np.zeros(len(begins), np.uint64)
    padded = np.concatenate([words.hashes, np.zeros(ngram, np.uint64)])
    for place, multiplier in enumerate(_numbers("place", ngram)):
        found += padded[begins + place] * multiplier
    for text in np.flatnonzero(counts < ngram):  # the words of the next text are not its own
        own = words.hashes[words.first[text] : words.first[text + 1]]
        found[first[text]] = (own * _numbers("place", len(own))).sum()
    hashes = (finalised(found) >> np.uint64(32)).astype(np.uint32)
    for text in np.flatnonzero(counts == 0).tolist():
        whole = text_hash(texts.slice(text, 1))[0]
        hashes[first[text]] = int.from_bytes(whole[:4], "little")
    return hashes, first


def _words(texts: pa.Array) -> _Words:
    """The hash of every word: a polynomial over its bytes, modulo 2^64, mixed."""
    texts = _separated(texts)
    data = np.frombuffer(text_bytes(texts).translate(_TABLE), np.uint8)
    edges = text_offsets(texts)
    edges -= edges[0]
    inside = data != ord(" ")
    new = ~np.concatenate([[False], inside[:-1]])[: len(data)]
    new[edges[:-1][edges[:-1] < len(data)]] = True
    begins = np.flatnonzero(inside & new)
    over = np.concatenate([new[1:] | ~inside[1:], [True]])[: len(data)]
    ends = np.flatnonzero(inside & over) + 1
    begins, ends = _cut(begins, ends)
    hashes = np.empty(len(begins), np.uint64)
    blocks = np.searchsorted(begins, np.arange(0, len(data) + _BLOCK_BYTES, _BLOCK_BYTES))
    for low, high in zip(blocks[:-1].tolist(), blocks[1:].tolist(), strict=True):
        if low < high:
            start, end = begins[low], ends[high - 1]
            hashes[low:high] = _polynomials(
                data[start:end], begins[low:high] - start, ends[low:high] - start
            )
    return _Words(hashes, np.searchsorted(begins, edges))


def _separated(texts: pa.Array) -> pa.Array:
    """The texts with spaces between words, and what is not ASCII in lower case and NFKC."""
    ascii = pc.call_function("string_is_ascii", [texts])
    other = pc.call_function("invert", [ascii])
    if not other.true_count:
        return texts
    texts = texts.cast(pa.large_string())  # it may become longer than 2 GiB
    found = texts.filter(other)
    found = pc.call_function("utf8_normalize", [found], pc.Utf8NormalizeOptions("NFKC"))
    found = pc.call_function("utf8_lower", [found])
    for pattern, by in ((_NO_WORD, " "), (_ALONE, r" \1 ")):
        options = pc.ReplaceSubstringOptions(pattern, by)
        found = pc.call_function("replace_substring_regex", [found], options)
    return pc.call_function("replace_with_mask", [texts, other, found])


def _cut(begins: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The words with longer ones cut, so that no block is longer than memory allows."""
    counts = -(-(ends - begins) // _LONGEST)
    if not len(counts) or counts.max() == 1:
        return begins, ends
    parts = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    begins = np.repeat(begins, counts) + parts * _LONGEST
    return begins, np.minimum(begins + _LONGEST, np.repeat(ends, counts))


def _polynomials(data: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """uint64 of each range of bytes: the sum of byte times base^(its index in the range), mixed."""
    powers, inverses = _powers(_BLOCK_BYTES + _LONGEST)
    sums = np.zeros(len(data) + 1, np.uint64)
    np.cumsum(data * powers[: len(data)], out=sums[1:])
    lengths = (ends - begins).astype(np.uint64)  # a word is no other word followed by zero bytes
    return finalised((sums[ends] - sums[begins]) * inverses[begins] + lengths)


@functools.cache
def _powers(count: int) -> tuple[np.ndarray, np.ndarray]:
    """uint64 [count] each: the base to the powers 0, 1, ..., and the inverses modulo 2^64."""
    found = []
    for base in (_BASE, pow(_BASE, -1, 1 << 64)):
        powers = np.full(count, base, np.uint64)
        powers[0] = 1
        found.append(np.cumprod(powers))
    return found[0], found[1]


@functools.cache
def _numbers(name: str, count: int) -> np.ndarray:
    """uint64 [count]: odd numbers that are the same in every process and release."""
    names = [f"minhash/{name}/{index}".encode() for index in range(count)]
    digests = b"".join(hashlib.blake2b(each, digest_size=8).digest() for each in names)
    return np.frombuffer(digests, "<u8").astype(np.uint64) | np.uint64(1)
