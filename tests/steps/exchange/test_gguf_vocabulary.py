"""A tokenizer as llama.cpp reads it: named where it is known, refused where it is not."""

from __future__ import annotations

import json

import pytest
from gguf import TokenType

from data.tokenizer.special_tokens import EOS
from pipeline.errors import InputError
from steps.exchange.gguf.vocabulary import read_vocabulary
from tests.data.tokenizer.split_tokenizers import tokenizer_json

ENDS = {"eos_token": EOS}


def changed(name: str = "gpt2", **fields) -> bytes:
    """The tokenizer of that name with other fields; `model` is merged."""
    description = json.loads(tokenizer_json(name))
    description["model"].update(fields.pop("model", {}))
    return json.dumps(description | fields).encode()


def added(content: str, **flags) -> dict:
    plain = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
    return {"id": 1000, "content": content, "special": False, **plain, **flags}


@pytest.mark.parametrize(
    ("name", "pre"),
    [("gpt2", "gpt-2"), ("gpt2 split", "gpt-2"), ("llama3", "llama-bpe"), ("qwen2", "qwen2")],
)
def test_the_expression_has_llama_cpps_name(name, pre):
    """Ours, tiktoken's, and those of two families of models."""
    found = read_vocabulary(tokenizer_json(name), ENDS, 1000)
    assert found.pre == pre
    assert (found.bos, found.eos, found.pad, found.add_bos) == (0, 0, None, False)
    assert found.composes == (name == "qwen2")


def test_words_of_the_vocabulary_taken_whole_or_not():
    """Llama 3's expression has a name with that and a name without."""
    assert (
        read_vocabulary(changed("llama3", model={"ignore_merges": False}), ENDS, 1000).pre == "dbrx"
    )
    with pytest.raises(InputError, match="ignore_merges True"):
        read_vocabulary(changed(model={"ignore_merges": True}), ENDS, 1000)


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def split(pattern: dict, behavior: str = "Isolated", last: dict = BYTES) -> dict:
    part = {"type": "Split", "pattern": pattern, "behavior": behavior, "invert": False}
    return {"type": "Sequence", "pretokenizers": [part, last]}


@pytest.mark.parametrize(
    "fields",
    [
        {"pre_tokenizer": None},
        {"pre_tokenizer": {**BYTES, "add_prefix_space": True}},
        {"pre_tokenizer": {**BYTES, "use_regex": False}},
        {"pre_tokenizer": split({"Regex": r"\s+"}, last={**BYTES, "use_regex": False})},
        {"pre_tokenizer": split({"Regex": r"\d"})},
        {"pre_tokenizer": split({"String": " "}, last={**BYTES, "use_regex": False})},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Punctuation"}, BYTES]}},
        {"normalizer": {"type": "Lowercase"}},
        {"normalizer": {"type": "NFC"}},
        {"model": {"byte_fallback": True}},
        {"model": {"end_of_word_suffix": "</w>"}},
    ],
)
def test_what_llama_cpp_would_divide_otherwise_is_refused(fields):
    """In one line, not with other ids."""
    with pytest.raises(InputError, match=r"tokenizer\.json: .*llama\.cpp"):
        read_vocabulary(changed(**fields), ENDS, 1000)


def test_every_row_has_a_token_of_its_own():
    """Fillers are unused tokens whose text no other has; llama.cpp ends where two are equal."""
    own = json.loads(tokenizer_json("gpt2"))["added_tokens"]
    content = changed(added_tokens=[*own, added("[PAD1002]")])
    found = read_vocabulary(content, ENDS, 1005)
    assert len(set(found.tokens)) == len(found.tokens) == len(found.types) == 1005
    assert found.tokens[1000:] == ["[PAD1002]", "[PAD1001]", "[PAD1002]_", "[PAD1003]", "[PAD1004]"]
    assert found.types[1000:] == [TokenType.USER_DEFINED, *[TokenType.UNUSED] * 4]
    assert found.types[0] == TokenType.CONTROL
    assert set(found.types[1:1000]) == {TokenType.NORMAL}
    vocabulary = json.loads(content)["model"]["vocab"]
    assert all(found.tokens[index] == text for text, index in vocabulary.items())


def test_special_tokens_by_name_or_by_id():
    """Of tokenizer_config.json in both of its forms, else of config.json."""
    named = {"eos_token": {"content": EOS}, "bos_token": "a", "pad_token": "b", "bos_token_id": 5}
    found = read_vocabulary(tokenizer_json("gpt2"), named, 1000)
    vocabulary = json.loads(tokenizer_json("gpt2"))["model"]["vocab"]
    assert (found.eos, found.bos, found.pad) == (0, vocabulary["a"], vocabulary["b"])
    assert read_vocabulary(tokenizer_json("gpt2"), {"eos_token_id": [7, 8]}, 1000).eos == 7


def test_a_bos_that_the_tokenizer_puts_in_front():
    """Is put there by llama.cpp too; anything else that is inserted cannot be."""

    def template(*names: str) -> bytes:
        pieces = [
            {"Sequence": {"id": "A", "type_id": 0}}
            if name == "A"
            else {"SpecialToken": {"id": name, "type_id": 0}}
            for name in names
        ]
        return changed(
            post_processor={
                "type": "TemplateProcessing",
                "single": pieces,
                "pair": [*pieces, {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {EOS: {"id": EOS, "ids": [0], "tokens": [EOS]}},
            }
        )

    assert read_vocabulary(template(EOS, "A"), ENDS, 1000).add_bos
    with pytest.raises(InputError, match=r"puts \[\] before a text and \[0\] after it"):
        read_vocabulary(template("A", EOS), ENDS, 1000)


@pytest.mark.parametrize(
    ("content", "special", "rows", "line"),
    [
        (changed(), ENDS, 999, "1000 ids, more than the model's 999"),
        (changed(), {}, 1000, "without which llama.cpp takes id 11"),
        (changed(), {"eos_token": "</nowhere>"}, 1000, "'</nowhere>', which is no token"),
        (changed(model={"merges": []}), ENDS, 1000, "no merges"),
        (b"{", ENDS, 1000, "expected the JSON of a tokenizer"),
    ],
)
def test_refusals(content, special, rows, line):
    """A line each."""
    with pytest.raises(InputError, match=line):
        read_vocabulary(content, special, rows)


def test_a_token_that_takes_the_space_before_it_is_refused():
    """llama.cpp takes the text alone."""
    own = json.loads(tokenizer_json("gpt2"))["added_tokens"]
    with pytest.raises(InputError, match="'<x>' has lstrip"):
        read_vocabulary(changed(added_tokens=[*own, added("<x>", lstrip=True)]), ENDS, 1001)


@pytest.mark.parametrize("content", ["the", EOS])
def test_two_ids_of_one_text_are_refused(content):
    """llama.cpp aborts when it loads them."""
    own = json.loads(tokenizer_json("gpt2"))["added_tokens"]
    with pytest.raises(InputError, match="with the id 1000: expected one id for each text"):
        read_vocabulary(changed(added_tokens=[*own, added(content)]), ENDS, 1001)
