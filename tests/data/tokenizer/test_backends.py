"""Whatever back end is chosen, the ids are those of tokenizers."""

import functools
import sys

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.tokenizer import backends
from data.tokenizer.backends import (
    CheckedEncoder,
    strings,
    to_compare,
)
from data.tokenizer.special_tokens import EOS
from data.tokenizer.text_tokenizer import TextTokenizer
from pipeline.errors import InputError
from tests.data.tokenizer.split_tokenizers import UNSUPPORTED, tokenizer_json


def expected(name, texts):
    """The oracle's ids, text by text."""
    tokenizer = _tokenizer(name)
    return [tokenizer.encode_batch([text])[0].tolist() for text in texts]


def by_text(encoded):
    ids, lengths = encoded
    assert ids.dtype == np.uint32
    assert lengths.dtype == np.int64
    assert lengths.sum() == len(ids)
    ends = np.cumsum(lengths).tolist()
    return [
        ids[end - size : end].tolist() for size, end in zip(lengths.tolist(), ends, strict=True)
    ]


@functools.cache
def _tokenizer(name):
    return TextTokenizer(tokenizer_json(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "gpt2 split", "llama3", "o200k"])
def test_every_character_of_the_basic_plane_has_the_oracles_ids(name):
    """Among letters, digits, spaces and itself: tables of two Unicode versions may differ."""
    pytest.importorskip("fastokens")
    encoder = _tokenizer(name).checked("fastokens")
    characters = [chr(c) for c in range(0x10000) if not 0xD800 <= c < 0xE000]
    each = [f"a{c}b {c} 1{c}!{c}A  {c}{c}'s\n{c}\u0301x" for c in characters]
    texts = ["".join(each[begin : begin + 64]) for begin in range(0, len(each), 64)]
    found, wanted = encoder.encode(pa.array(texts)), _tokenizer(name).encode_batch(texts)
    assert all(map(np.array_equal, found, wanted))
    assert encoder.by_oracle <= 2


@pytest.mark.slow
@pytest.mark.parametrize("name", UNSUPPORTED)
def test_a_tokenizer_the_fast_back_end_may_misread_is_left_to_the_oracle(name):
    """Without a warning by default, with an error when the back end is asked for."""
    pytest.importorskip("fastokens")
    tokenizer = TextTokenizer(tokenizer_json(name))
    assert tokenizer.checked("auto").record()["backend"] == "tokenizers"
    with pytest.raises(InputError, match="backend='fastokens': it is not known to give the ids"):
        tokenizer.checked("fastokens")


def test_auto_is_the_oracle_where_nothing_else_is_installed(monkeypatch):
    """And asking for what is not there is refused."""
    monkeypatch.setitem(sys.modules, "fastokens", None)
    tokenizer = TextTokenizer(tokenizer_json("gpt2"))
    assert tokenizer.checked().record()["backend"] == "tokenizers"
    with pytest.raises(InputError, match="not installed"):
        tokenizer.checked("fastokens")


class Wrong:
    """A back end that errs on texts with a certain word, or fails on them."""

    name, version = "wrong", "0"

    def __init__(self, oracle, word, error=None):
        self._oracle, self._word, self._error = oracle, word, error
        self.given = []

    def encode(self, texts):
        self.given += strings(texts)
        if self._error is not None and any(self._word in text for text in strings(texts)):
            raise self._error
        return self._oracle.encode([t.replace(self._word, "") for t in strings(texts)])


class PanicException(BaseException):
    """As pyo3 names a panic."""


@pytest.fixture
def oracle():
    return TextTokenizer(tokenizer_json("gpt2"))._oracle


TEXTS = [f"document {number} has words" for number in range(100)]


def test_after_a_difference_the_oracle_encodes(oracle):
    """The document is shown, wherever in it the ids differ, and every id is the oracle's."""
    encoder = CheckedEncoder(oracle, Wrong(oracle, "héllo"))
    encoder.check(pa.array(TEXTS))
    assert encoder.record() == {
        "backend": "wrong",
        "version": "0",
        "by_oracle": 0,
        "fell_back": False,
    }
    texts = pa.array([*TEXTS[:99], "words " * 2000 + "héllo " * 1000])
    encoder.check(texts)
    record = encoder.record()
    assert (record["fell_back"], record["backend"]) == (True, "tokenizers")
    assert "'words words" in record["difference"]
    assert by_text(encoder.encode(texts)) == expected("gpt2", texts.to_pylist())


@pytest.mark.parametrize("error", [ValueError("no"), PanicException("at line 7")])
def test_a_failing_back_end_is_replaced_in_the_middle(oracle, error):
    """Ids before and after are the oracle's; the reason is kept."""
    encoder = CheckedEncoder(oracle, Wrong(oracle, "poison", error))
    texts = [*TEXTS[:50], "poison", *TEXTS[50:]]
    for begin in range(0, len(texts), 20):
        part = texts[begin : begin + 20]
        assert by_text(encoder.encode(pa.array(part))) == expected("gpt2", part)
    assert type(error).__name__ in encoder.record()["difference"]


def test_an_interrupt_is_no_failure_of_the_back_end(oracle):
    """It ends the run."""
    encoder = CheckedEncoder(oracle, Wrong(oracle, "stop", KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        encoder.encode(pa.array(["stop"]))


@pytest.mark.parametrize("added", [[EOS], [EOS, *(f"<|extra{n}|>" for n in range(40))]])
def test_texts_of_added_tokens_go_to_the_oracle(oracle, added):
    """The documents that hold them and no others; in their places."""
    fast = Wrong(oracle, "nowhere")
    encoder = CheckedEncoder(oracle, fast, added=added)
    texts = ["one", f"a {added[-1]} b", "", "u\u180ev", "last", f"{EOS}", "if'\u017f's"]
    assert by_text(encoder.encode(pa.array(texts))) == expected("gpt2", texts)
    assert fast.given == ["one", "", "last"]
    assert encoder.by_oracle == 4


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text("aé字😀 ", max_size=30), max_size=80))
def test_documents_to_compare_are_spread_and_exotic(texts):
    """First and last, each once, and the documents with most bytes beyond ASCII; all whole."""
    found = to_compare(pa.array(texts, pa.string())).to_pylist()
    assert len(found) == min(len(found), 24, len(texts))
    assert set(found) <= set(texts)
    if texts:
        assert {texts[0], texts[-1]} <= set(found)
        exotic = sorted((len(text.encode()) - len(text) for text in texts), reverse=True)
        picked = sorted((len(text.encode()) - len(text) for text in found), reverse=True)
        assert picked[:8] == exotic[: len(picked)][:8]


def test_documents_to_compare_are_bounded():
    """256 KiB together; of texts that are all longer, the beginning of the shortest."""
    texts = pa.array(["x" * 100_000] * 20 + ["é" * 400_000])
    assert len(to_compare(texts)) == 2
    assert to_compare(texts[20:]).to_pylist() == ["é" * (256 << 10)]


def test_nulls_and_slices():
    """A null is refused; a slice of a large_string array is its texts."""
    array = pa.array(["a", "b", "", "héé"], pa.large_string())
    assert strings(array[1:]) == ["b", "", "héé"]
    assert backends.text_bytes(array[1:]) == "bhéé".encode()
    assert backends.text_bytes(array[:0]) == b""
    with pytest.raises(InputError, match="1 nulls among 2"):
        strings(pa.array(["a", None]))
