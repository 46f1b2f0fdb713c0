"""Text as it comes against the text of all ids at once."""

from __future__ import annotations

import functools
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from data.tokenizer.byte_vocabulary import byte_tokenizer_json
from data.tokenizer.special_tokens import EOS
from data.tokenizer.text_tokenizer import TextStream, TextTokenizer, train
from data.tokenizer.tokenizer_file import with_fields
from pipeline.errors import InputError
from tests.data.tokenizer.published_shapes import KEEPING, shape

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


@given(
    ids=st.lists(st.integers(0, 299), max_size=40), cuts=st.lists(st.integers(0, 40), max_size=20)
)
def test_any_ids_read_as_they_do_at_once(ids, cuts):
    """Also those of bytes that are no characters, and of end tokens between."""
    said = pieces(ids, [min(cut, len(ids)) for cut in cuts])
    assert "".join(said) == tokenizer().decode(ids)


def test_a_character_is_said_with_its_last_byte():
    """A balloon is four bytes, each an id of its own here."""
    stream = TextStream(TextTokenizer(byte_tokenizer_json()))
    said = [stream.push([byte]) for byte in "a🎈b".encode()]
    assert said == ["a", "", "", "", "🎈", "b"]
    assert stream.push([]) == stream.finish() == ""


def test_what_is_cut_off_within_a_character_is_said_at_the_end():
    """As U+FFFD, like the text of all ids at once."""
    stream = TextStream(TextTokenizer(byte_tokenizer_json()))
    assert stream.push("a🎈".encode()[:-1]) == "a"
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""


def test_prompts():
    """Begin with BOS, which is EOS here; what is no text is refused."""
    made = tokenizer()
    assert made.decode(made.prompt_ids(TEXT)) == EOS + TEXT
    assert made.decode(made.prompt_ids("")) == EOS
    with pytest.raises(InputError, match="surrogate"):
        made.prompt_ids("a\udc80")


@functools.cache
def published(name: str) -> TextTokenizer:
    """A tokenizer in the shape of a published one."""
    return TextTokenizer(shape(name))


SCRIPTS = st.text(st.sampled_from("ab e\u0301  \n12ཨོཾ་མ་ཎི東京タワー🦙🎈Привет\u2581"), max_size=24)


library = functools.cache(lambda name: Tokenizer.from_str(shape(name).decode()))


def library_text(name: str, ids: list[int]) -> str:
    """The text of ids at once, by the `tokenizers` library."""
    return library(name).decode(ids, skip_special_tokens=False)


def text_of(name: str, ids: list[int], whole: str) -> str:
    """The complete characters of the first ids of a text.

    The library writes U+FFFD for whole runs of byte tokens that end within a character.
    """
    begun = (library_text(name, ids[:n]).rstrip("\ufffd") for n in range(len(ids) + 1))
    return max((text for text in begun if whole.startswith(text)), key=len)


@pytest.mark.slow
@pytest.mark.parametrize("name", KEEPING)
@settings(max_examples=30)
@given(text=SCRIPTS, cut=st.integers(1, 80), cuts=st.lists(st.integers(0, 80), max_size=9))
def test_a_continuation_is_the_rest_of_the_text(name, text, cut, cuts):
    """Cut anywhere between ids, at once and as a stream, of every kind of tokenizer."""
    made = published(name)
    ids = made.prompt_ids(text)
    before, rest = ids[:cut], ids[cut:]
    whole = library_text(name, ids[1:])
    wanted = whole.removeprefix(text_of(name, before[1:], whole))
    assert made.decode(rest, before) == wanted
    stream = TextStream(made, before)
    edges = [0, *sorted(min(c, len(rest)) for c in cuts), len(rest)]
    pushed = [stream.push(rest[a:b]) for a, b in pairwise(edges)]
    assert "".join(pushed) == wanted
    assert "\ufffd" not in wanted
    assert stream.finish() == ""


@pytest.mark.parametrize("name", ["llama2", "gemma", "unigram"])
def test_a_byte_that_is_no_character_changes_no_other(name):
    """The library replaces all bytes of a run of byte tokens by U+FFFD if one is wrong."""
    made = published(name)
    ids = made.encode_batch(["མ"])[0].tolist()[-3:]
    assert made.decode([*ids, ids[0], *ids], ids) == "མ\ufffdམ"


def test_a_lossy_tokenizer_decodes_to_words():
    """Of which the first has no space before it, unless it continues a text."""
    made = TextTokenizer(with_fields(shape("wordpiece"), eos_token="[SEP]", lossy=True))
    ids = made.encode_batch(["the value of this"])[0].tolist()
    assert made.decode(ids) == library_text("wordpiece", ids) == "the value of this"
    assert made.decode(ids[1:], ids[:1]) == made.decode(ids).removeprefix(made.decode(ids[:1]))
