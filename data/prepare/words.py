"""The words of texts as 64-bit hashes: without case, accents and punctuation.

A word is what stands between white space, of which letters and digits count, as in the filtering of
training data by Brown et al. 2020, "Language Models are Few-Shot Learners", appendix C: "a
lowercase, whitespace delimited word with no punctuation". Two things are more than that: accents do
not count, so that composed and decomposed Unicode are equal; and where a script is written without
spaces (Han, kana, Thai, Lao, Burmese, Khmer), each of its letters is a word.
"""

from __future__ import annotations

import functools
import unicodedata
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data.read.values import neighbours, text_bytes, text_offsets

_DROPPED, _LETTER, _ALONE, _SPACE = range(4)
_NAMED = 0x20000  # code points from here to the end of the table are Han
_CODES = 0x40000
_WITHOUT_SPACES = (
    *((0x0E00, 0x0F00), (0x1000, 0x10A0), (0x1780, 0x1800), (0x3040, 0x3100)),
    *((0x31F0, 0x3200), (0x3400, 0x4DC0), (0x4E00, 0xA000), (0xF900, 0xFB00)),
)
_AT_ONCE = 1 << 19  # bytes of text, unless one text is longer: about 50 bytes of memory each


class Words(NamedTuple):
    """The words of some texts, in their order, without the punctuation around them."""

    hashes: np.ndarray  # uint64 [words]
    text: np.ndarray  # int64 [words], index of the word's text, ascending
    start: np.ndarray  # int64 [words], the word's first character in its text
    end: np.ndarray  # int64 [words], the character behind it


def mixed(values: np.ndarray) -> np.ndarray:
    """uint64 of the same shape, each mixed after the addition of a constant, as SplitMix64 does."""
    return finalised(values + np.uint64(0x9E3779B97F4A7C15))


def finalised(z: np.ndarray) -> np.ndarray:
    """uint64 of the same shape: a bijection in which every bit depends on all bits.

    It is that of SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number
    generators").
    """
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def folded(character: str) -> str:
    """The letter or digit that a character counts as: "e" for "É"; "" for one that is dropped."""
    lower = character.casefold()
    lower = lower if len(lower) == 1 else character.lower()
    kept = [c for c in unicodedata.normalize("NFKD", lower) if unicodedata.category(c)[0] in "LN"]
    if len(kept) == 1:
        return kept[0]
    return character if unicodedata.category(character)[0] in "LN" else ""


def batches_of_words(texts: pa.Array) -> Iterator[tuple[int, int, Words]]:
    """(index of the first text, of the one after the last, words) of neighbouring texts.

    Together they have about 512 KiB of text. `Words.text` counts from the first one. The texts are
    a string array without nulls.
    """
    for begin, end in neighbours(text_offsets(texts), _AT_ONCE):
        yield begin, end, words(texts.slice(begin, end - begin))


def words(texts: pa.Array) -> Words:
    """The words of a string array without nulls. Its memory is about 50 times the text's."""
    kinds, values = _tables()
    utf32 = text_bytes(texts).decode().encode("utf-32-le")
    codes = np.minimum(np.frombuffer(utf32, "<u4"), np.uint32(_CODES))
    lengths = pc.call_function("utf8_length", [texts]).to_numpy(zero_copy_only=False)
    begins = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    kind = kinds[codes]
    cut = np.zeros(len(codes) + 1, bool)  # whether another word begins here, or after it
    cut[:-1] = kind == _SPACE
    cut[begins] = True
    alone = np.flatnonzero(kind == _ALONE)
    cut[alone] = cut[alone + 1] = True
    at = np.flatnonzero((kind == _LETTER) | (kind == _ALONE))
    group = np.cumsum(cut, dtype=np.int32)[at]
    first = np.flatnonzero(np.diff(group, prepend=-1))
    if not len(first):
        none = np.zeros(0, np.int64)
        return Words(none.astype(np.uint64), none, none, none)
    size = np.diff(first, append=len(at))
    place = np.arange(len(at)) - np.repeat(first, size)
    # A sum of random odd multiples of random numbers: equal for two words with odds of 2^-64.
    factors = mixed(np.arange(int(size.max()), dtype=np.uint64)) | np.uint64(1)
    hashes = mixed(np.add.reduceat(values[codes[at]] * factors[place], first))
    start, end = at[first], at[first + size - 1] + 1
    text = np.searchsorted(begins, start, side="right") - 1
    return Words(hashes, text, start - begins[text], end - begins[text])


@functools.cache
def _tables() -> tuple[np.ndarray, np.ndarray]:
    """(uint8 kind, uint64 random number) of every code point; the last entry is for all others."""
    named = [chr(code) for code in range(_NAMED)]
    letters = [folded(character) for character in named]
    kinds = np.full(_CODES + 1, _DROPPED, np.uint8)
    kinds[:_NAMED] = [
        _SPACE if character.isspace() else _LETTER if letter else _DROPPED
        for character, letter in zip(named, letters, strict=True)
    ]
    for begin, end in (*_WITHOUT_SPACES, (_NAMED, _CODES)):
        inside = kinds[begin:end]
        inside[(inside == _LETTER) | (begin == _NAMED)] = _ALONE
    codes = np.arange(_CODES + 1, dtype=np.uint64)
    codes[:_NAMED] = [ord(letter) if letter else 0 for letter in letters]
    return kinds, mixed(codes)
