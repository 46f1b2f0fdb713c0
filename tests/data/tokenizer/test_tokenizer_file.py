"""Tokenizers in the shape of published ones: the library's ids, and all of the text comes back."""

import contextlib
import copy
import functools
import json
import operator
import random

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from data.tokenizer import tokenizer_file
from data.tokenizer.text_tokenizer import TextTokenizer
from pipeline.errors import InputError
from tests.data.tokenizer.published_shapes import EOS_NAMES, KEEPING, shape
from tests.data.tokenizer.split_tokenizers import documents

CHANGES = 20  # of each tokenizer; a thousand were tried


@functools.cache
def loaded(name):
    return TextTokenizer(shape(name))


def plain(name):
    """The library alone."""
    return Tokenizer.from_str(shape(name).decode())


def added_space(name):
    return name in ("llama2", "unigram")


@pytest.mark.slow
@pytest.mark.parametrize("name", KEEPING)
def test_ids_are_the_librarys_and_eos_is_found(name):
    """Of whole documents, with nothing added and nothing left out."""
    made, library = loaded(name), plain(name)
    texts = documents(20)
    ids, lengths = made.encode_batch(texts)
    expected = [e.ids for e in library.encode_batch(texts, add_special_tokens=False)]
    assert [p.tolist() for p in np.split(ids, np.cumsum(lengths)[:-1])] == expected
    assert made.eos_id == library.token_to_id(EOS_NAMES[name])
    inserted = library.encode(texts[0]).ids
    assert made.prompt_ids(texts[0]) == [made.bos_id, *expected[0]]
    assert inserted in (made.prompt_ids(texts[0]), expected[0])
    assert made.bos_id == (inserted[0] if name == "llama3" else made.eos_id)
    description = json.loads(shape(name))
    added = {token["id"] for token in description["added_tokens"]}
    assert made.vocab_size == len({*tokenizer_file.ids_of(description).values(), *added})
    found = list(made.encode_documents([pa.array(texts)], made.checked()))
    assert np.concatenate([part for part, _ in found]).tolist() == ids.tolist()


@settings(max_examples=25, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
@pytest.mark.parametrize("name", KEEPING)
def test_texts_come_back_and_their_bytes_add_up(name, text):
    """But for what is accepted: NFC, U+2581, and the space before a document."""
    made = loaded(name)
    text = text.replace("\u2581", "").lstrip(" ")
    if name == "qwen":
        text = made.decode(made.encode_batch([text])[0])  # composed
    ids = made.encode_batch([text])[0]
    assert made.decode(ids) == text
    size = len(text.encode()) + (added_space(name) and bool(text))
    assert made.token_bytes[ids].sum() == size


@pytest.mark.parametrize("name", KEEPING)
def test_no_text_holds_a_special_token(name):
    """Each name written in a text stays text, also where it is an entry of a Unigram model."""
    made, description = loaded(name), json.loads(shape(name))
    for token in description["added_tokens"]:
        text = f"a {token['content']} b{token['content']}"
        ids = made.encode_batch([text, "x"])[0]
        assert made.decode(ids[:-1]).startswith(text[:5])
        assert not token["special"] or token["id"] not in ids


def test_a_bos_that_is_no_token_is_refused():
    """With the tokens that there are."""
    with pytest.raises(InputError, match=r"bos='<none>' is not in the vocabulary; .* '<s>'"):
        tokenizer_file.with_fields(shape("unigram"), bos_token="<none>")


def test_two_ids_before_a_text_are_refused():
    """A document begins with one."""
    description = json.loads(shape("llama3"))
    template = description["post_processor"]["single"]
    template.insert(0, template[0])
    with pytest.raises(InputError, match=r"puts the ids .* before a text; expected at most one"):
        TextTokenizer(json.dumps(description).encode())


def test_a_tokenizer_that_loses_text_must_be_accepted_by_name():
    """WordPiece has ids for lower case alone; accepted, its ids are the library's."""
    with pytest.raises(InputError, match=r"changes text; .* accept what it loses with lossy=True"):
        TextTokenizer(shape("wordpiece"))
    content = tokenizer_file.with_fields(shape("wordpiece"), eos_token="[SEP]", lossy=True)
    made, library = TextTokenizer(content), plain("wordpiece")
    text = documents(1)[0]
    ids = made.encode_batch([text])[0]
    assert ids.tolist() == library.encode(text, add_special_tokens=False).ids
    assert made.eos_id == library.token_to_id("[SEP]")
    assert made.token_bytes[ids].sum() == pytest.approx(len(text.encode()), rel=0.2)


def test_a_padded_vocabulary_has_ids_that_stand_for_nothing():
    """And no fewer ids than entries."""
    content = shape("qwen")
    entries = TextTokenizer(content).vocab_size
    padded = tokenizer_file.with_fields(content, vocab_size=2048)
    made = TextTokenizer(padded)
    assert (made.vocab_size, made.token_bytes[entries:].sum()) == (2048, 0)
    assert (
        made.encode_batch(["a b"])[0].tolist() == loaded("qwen").encode_batch(["a b"])[0].tolist()
    )
    with pytest.raises(InputError, match=f"vocab_size=10: expected at least the {entries:,}"):
        tokenizer_file.with_fields(content, vocab_size=10)


def test_any_token_may_be_named_eos():
    """One that was plain becomes special, so no text holds it."""
    made = TextTokenizer(tokenizer_file.with_fields(shape("qwen"), eos_token="<tool_call>"))
    assert made.eos_id not in made.encode_batch(["a <tool_call> b"])[0]
    ids = loaded("qwen").encode_batch(["a <tool_call> b"])[0]
    assert ids.tolist().count(made.eos_id) == 1
    assert loaded("qwen").decode(ids) == "a <tool_call> b"
    assert loaded("qwen").token_bytes[ids].sum() == len("a <tool_call> b")
    with pytest.raises(InputError, match="eos='<no>' is not in the vocabulary"):
        tokenizer_file.with_fields(shape("qwen"), eos_token="<no>")


@pytest.mark.parametrize(
    "change",
    [
        {"decoder": -1},
        {"decoder": "ByteLevel"},
        {"decoder": {"type": True}},
        {"decoder": [{"type": "ByteLevel"}]},
        {"normalizer": [{}]},
        {"normalizer": {"type": "Sequence", "normalizers": [1]}},
        {"normalizer": {"type": "Sequence", "normalizers": {"type": "NFC"}}},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Sequence"}, None]}},
        {"pre_tokenizer": {}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": None}},
        {"pre_tokenizer": False},
        {"eos_token": ["</s>"]},
        {"lossy": "no"},
        {"vocab_size": "1000"},
    ],
    ids=str,
)
def test_a_part_of_another_type_is_refused_by_its_name(change):
    """Whatever JSON it is."""
    description = {**json.loads(shape("gpt2")), **change}
    with pytest.raises(
        InputError, match=next(iter(change)) if "vocab" not in str(change) else "ids"
    ):
        TextTokenizer(json.dumps(description).encode())


def test_an_id_that_is_no_number_is_refused_behind_an_added_token_too():
    """The added token with the text of an entry does not hide the entry's id."""
    for wrong in (None, [], {}, True, "5"):
        description = json.loads(shape("gpt2"))
        description["model"]["vocab"]["<|endoftext|>"] = wrong
        with pytest.raises(InputError, match="expected ids of 0 to"):
            TextTokenizer(json.dumps(description).encode())


_JSON = (None, True, 0, -1, 1.5, "", "BPE", "ByteLevel", [], {}, [1], [None], {"type": "NFC"})


def _places(tree, path=()):
    """Paths of all values, of long collections only the first and the last ones."""
    yield path
    if isinstance(tree, dict | list):
        keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
        for key in {**dict.fromkeys(keys[:8]), **dict.fromkeys(keys[-2:])}:
            yield from _places(tree[key], (*path, key))


@pytest.mark.slow
@pytest.mark.parametrize("name", KEEPING)
@pytest.mark.parametrize("lossy", [False, True])
def test_any_change_of_a_type_is_read_or_refused(name, lossy):
    """One value or two are removed or replaced: no other error than InputError."""
    draw = random.Random(f"{name} {lossy}")
    whole = json.loads(shape(name))
    places = [place for place in _places(whole) if place]
    for _ in range(CHANGES):
        description = copy.deepcopy({**whole, "lossy": lossy})
        for place in draw.sample(places, draw.choice((1, 1, 2))):
            try:
                at = functools.reduce(operator.getitem, place[:-1], description)
                if draw.random() < 0.3:
                    del at[place[-1]]
                else:
                    at[place[-1]] = copy.deepcopy(draw.choice(_JSON))
            except (KeyError, IndexError, TypeError):
                continue  # the first change removed it
        with contextlib.suppress(InputError):
            made = TextTokenizer(json.dumps(description).encode())
            made.checked().encode(pa.array(["some words"]))
