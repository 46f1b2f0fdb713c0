"""Words of texts against str.split and unicodedata."""

from __future__ import annotations

import unicodedata

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.prepare import words as words_module
from data.prepare.words import batches_of_words, words

TEXTS = st.lists(st.text(st.sampled_from("aBé\u0301É .,'-\n\u00a0\u2028ßΣς漢ก字𠀀…“1²\U0001f600")))


def letter(character):
    """As `data.prepare.words` says it, for the alphabet above."""
    lower = {"ß": "ß", "ς": "\u03c3"}.get(character, character.lower())
    kept = [c for c in unicodedata.normalize("NFKD", lower) if c.isalnum()]
    return "".join(kept)


def expected(text):
    """The words of a text, one character after the other."""
    found = []
    for chunk in text.split():
        word = ""
        for character in chunk:
            if character in "漢ก字𠀀":
                found += [word, character]
                word = ""
            else:
                word += letter(character)
        found.append(word)
    return [word for word in found if word]


def as_array(texts):
    return pa.array(texts, pa.string())


@given(TEXTS, st.integers(0, 3))
def test_words_are_those_of_a_loop_over_characters(texts, skipped):
    """Equal words have equal hashes and others do not, also in a slice of an array."""
    found = words(as_array(["x"] * skipped + texts).slice(skipped))
    wanted = [(index, word) for index, text in enumerate(texts) for word in expected(text)]
    assert found.text.tolist() == [index for index, _ in wanted]
    names = {}
    for (_, word), value in zip(wanted, found.hashes.tolist(), strict=True):
        assert names.setdefault(word, value) == value
    assert len(set(names.values())) == len(names)
    for (index, word), begin, end in zip(wanted, found.start, found.end, strict=True):
        covered = texts[index][begin:end]
        assert expected(covered) == [word]
        assert letter(covered[0])
        assert letter(covered[-1])


@given(TEXTS)
def test_pieces_of_an_array_have_the_words_of_the_whole(texts):
    """However little is read at once."""
    whole = words(as_array(texts))
    joined = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(words_module, "_AT_ONCE", 7)
        for begin, _, part in batches_of_words(as_array(texts)):
            joined += zip(part.hashes, part.text + begin, part.start, part.end, strict=True)
    assert joined == list(zip(*whole, strict=True))


HASHES = [
    "3769d0c40439f7ff",
    "ff8365fa593bbb12",
    "be1f5eb48727982e",
    "ab7e2e15f997a766",
    "00fd4c8efae12f34",
]


def test_hashes_stay_the_same():
    """A stored classifier has weights by hash, so these numbers must never change."""
    found = words(as_array(["Hello, World! don't naïve \uff21\uff22\uff23"])).hashes
    assert found.dtype == np.uint64
    assert [f"{value:016x}" for value in found.tolist()] == HASHES
    assert (found == words(as_array(["hello world dont naive abc"])).hashes).all()
