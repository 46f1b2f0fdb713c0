"""Text as it comes against the text of all ids at once."""

from __future__ import annotations

import functools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.tokenizer.special_tokens import EOS
from data.tokenizer.streaming_decode import TextStream, prompt_ids
from data.tokenizer.text_tokenizer import TextTokenizer, train
from pipeline.errors import InputError

TEXT = "Ålesund låter så här: 你好, 世界! Привет 🎈🎉 e\u0301 \ufffd"


@functools.cache
def tokenizer() -> TextTokenizer:
    """Every byte, some merges, EOS."""
    return TextTokenizer(train([[TEXT * 3]], vocab_size=300))


def pieces(ids: list[int], cuts: list[int]) -> list[str]:
    """What is said when the ids come in parts that end at `cuts`."""
    stream, start, said = TextStream(tokenizer()), 0, []
    for cut in [*sorted(cuts), len(ids)]:
        said.append(stream.push(ids[start:cut]))
        start = max(start, cut)
    return [*said, stream.finish()]


@given(text=st.text(max_size=30), cuts=st.lists(st.integers(0, 60), max_size=20))
def test_text_comes_whole(text, cuts):
    """Pieces of real text join to it, and nothing is held to the end but a real U+FFFD there."""
    ids = tokenizer().encode_batch([text])[0].tolist()
    said = pieces(ids, [min(cut, len(ids)) for cut in cuts])
    assert "".join(said) == text
    assert said[-1] == ("\ufffd" if text.endswith("\ufffd") else "")


@given(
    ids=st.lists(st.integers(0, 299), max_size=40), cuts=st.lists(st.integers(0, 40), max_size=20)
)
def test_any_ids_read_as_they_do_at_once(ids, cuts):
    """Also those of bytes that are no characters, and of end tokens between."""
    said = pieces(ids, [min(cut, len(ids)) for cut in cuts])
    assert "".join(said) == tokenizer().decode(ids)


def ids_of_bytes(data: bytes) -> list[int]:
    """An id for every byte, by the alphabet of GPT-2: letters for bytes that print, others after
    all bytes."""
    printing = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printing]
    letters = {b: chr(b) for b in printing} | {b: chr(256 + n) for n, b in enumerate(rest)}
    vocabulary = json.loads(tokenizer().content)["model"]["vocab"]
    return [vocabulary[letters[byte]] for byte in data]


def test_a_character_is_said_with_its_last_byte():
    """A balloon is four bytes, each an id of its own here."""
    stream = TextStream(tokenizer())
    said = [stream.push([i]) for i in ids_of_bytes("a🎈b".encode())]
    assert said == ["a", "", "", "", "🎈", "b"]
    assert stream.push([]) == stream.finish() == ""


def test_what_is_cut_off_within_a_character_is_said_at_the_end():
    """As U+FFFD, like the text of all ids at once."""
    stream = TextStream(tokenizer())
    ids = ids_of_bytes("a🎈".encode()[:-1])
    assert "".join(stream.push([i]) for i in ids) == "a"
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""


def test_prompts():
    """Ids of the text; an empty prompt is the end of a document; what is no text is refused."""
    made = tokenizer()
    assert made.decode(prompt_ids(made, TEXT)) == TEXT
    assert made.decode(prompt_ids(made, "")) == EOS
    with pytest.raises(InputError, match="surrogate"):
        prompt_ids(made, "a\udc80")
