"""Convert a tokenizer.json to the vocabulary of a GGUF file.

llama.cpp splits text with its own regular expressions, and a file only names one of them, its
"pre-tokenizer type" (`llama_vocab::impl::load` and `llm_tokenizer_bpe` in its llama-vocab.cpp).
llama.cpp's converter looks up the name by hashes of published tokenizers and refuses all others.
This module derives the name from the tokenizer's own expression, and refuses a tokenizer that
llama.cpp would split differently.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gguf import TokenType
from tokenizers import Tokenizer

from data.tokenizer.text_tokenizer import library
from data.tokenizer.tokenizer_file import for_library, ids_of, inserted, parse
from pipeline.errors import InputError

_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_TIKTOKEN_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_WORDS}|\p{{N}}|{_TAIL}"

# By expression and ignore_merges (whether a word in the vocabulary becomes one token unmerged).
_PRE_TYPES = {
    (_GPT2, False): "gpt-2",
    (_TIKTOKEN_GPT2, False): "gpt-2",
    (_LLAMA3, True): "llama-bpe",
    (_LLAMA3, False): "dbrx",
    (_QWEN2, False): "qwen2",
}
_PLAIN_MODEL = {
    "type": ("BPE",),
    "dropout": (None, 0.0),
    "unk_token": (None,),
    "continuing_subword_prefix": (None, ""),
    "end_of_word_suffix": (None, ""),
    "byte_fallback": (None, False),
}


@dataclass(frozen=True)
class Vocabulary:
    """The tokenizer metadata of a GGUF file."""

    pre: str  # llama.cpp's name of the expression that divides text into words
    tokens: list[str]  # of every id, in the byte-level alphabet; rows without an id are unused
    types: list[int]  # `gguf.TokenType` of every id
    merges: list[str]  # "left right", in the order of their priority
    bos: int
    eos: int
    pad: int | None
    add_bos: bool  # whether a text begins with BOS
    composes: bool  # whether the tokenizer normalizes text to NFC, which llama.cpp does not


def read_vocabulary(content: bytes, special: Mapping[str, Any], rows: int) -> Vocabulary:
    """The vocabulary of a model with `rows` ids.

    `special` has bos_token, eos_token and pad_token by name, as tokenizer_config.json, or their ids
    (`..._id`), as config.json.
    """
    tokenizer = _library(content)
    description = json.loads(tokenizer.to_str())  # complete, unlike the file
    pre = pre_type(description)
    merges = [" ".join(pair) for pair in description["model"]["merges"]]
    if not merges:
        raise InputError("tokenizer.json: no merges, without which llama.cpp loads no tokenizer")
    if odd := [merge for merge in merges if merge.count(" ") != 1]:
        raise InputError(f"tokenizer.json: llama.cpp cannot read the merge {odd[0]!r:.80}")
    tokens, types = _tokens(description, rows)
    ids = {token: index for index, token in enumerate(tokens)}
    eos = _special(special, "eos_token", ids, rows)
    if eos is None:
        raise InputError(
            "tokenizer_config.json: expected an eos_token, found none, without which llama.cpp "
            "takes id 11; name the one that ends a document"
        )
    bos = _special(special, "bos_token", ids, rows)
    bos = eos if bos is None else bos
    before, after = inserted(tokenizer)
    if before not in ([], [bos]) or after:
        raise InputError(
            f"tokenizer.json: encoding puts {before} before a text and {after} after it; "
            f"llama.cpp puts the BOS ({bos}) before it or nothing"
        )
    return Vocabulary(
        pre=pre,
        tokens=tokens,
        types=types,
        merges=merges,
        bos=bos,
        eos=eos,
        pad=_special(special, "pad_token", ids, rows),
        add_bos=before == [bos],
        composes=description.get("normalizer") is not None,
    )


def _library(content: bytes) -> Tokenizer:
    """The tokenizer of the library, whose ids are those of the file."""
    file = parse(content)
    tokenizer = library(for_library(content, file))
    read, texts = tokenizer.get_vocab(), {}
    added = ((t["content"], t["id"]) for t in file["added_tokens"])
    for text, index in [*ids_of(file).items(), *added]:
        if read.get(text) != index or texts.setdefault(index, text) != text:
            raise InputError(
                f"tokenizer.json: {text!r:.80} with the id {index}: expected one id for each text "
                "and one text for each id, without which llama.cpp loads no tokenizer"
            )
    return tokenizer


def pre_type(description: Mapping[str, Any]) -> str:
    """llama.cpp's name of the expression by which a tokenizer.json splits text."""
    model = description["model"]
    for name, allowed in _PLAIN_MODEL.items():
        if model.get(name) not in allowed:
            raise InputError(
                f"tokenizer.json: model.{name} is {model[name]!r}, which llama.cpp's byte-level "
                f"BPE does not support; expected {allowed[0]!r}"
            )
    whole = bool(model.get("ignore_merges"))
    expression = _expression(description.get("pre_tokenizer") or {})
    found = _PRE_TYPES.get((expression or "", whole))
    shown = expression or description.get("pre_tokenizer")
    normalizer = (description.get("normalizer") or {}).get("type")
    # llama.cpp reads Qwen's tokenizers without their NFC, since most texts are in NFC already.
    if found is None or normalizer not in ((None, "NFC") if found == "qwen2" else (None,)):
        raise InputError(
            f"tokenizer.json: no pre-tokenizer type of llama.cpp divides text like {shown!r:.200} "
            f"with normalizer {normalizer} and ignore_merges {whole}; known are the expressions of "
            "GPT-2, Llama 3 and Qwen2"
        )
    return found


def _expression(split: Mapping[str, Any]) -> str | None:
    """The regular expression of a byte-level pre-tokenizer; None for any other pre-tokenizer."""
    *parts, last = split.get("pretokenizers") or [split]
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        return None
    if not parts:
        return _GPT2 if last.get("use_regex", True) else None
    (first, *more), uses = parts, last.get("use_regex", True)
    plain = first.get("behavior") == "Isolated" and not first.get("invert")
    if more or uses or first.get("type") != "Split" or not plain:
        return None
    return first["pattern"].get("Regex")


def _tokens(description: Mapping[str, Any], rows: int) -> tuple[list[str], list[int]]:
    """Text and type of the ids 0 to `rows`."""
    texts = {index: token for token, index in description["model"]["vocab"].items()}
    types = dict.fromkeys(texts, TokenType.NORMAL)
    for token in description["added_tokens"]:
        texts[token["id"]] = token["content"]
        types[token["id"]] = TokenType.CONTROL if token["special"] else TokenType.USER_DEFINED
        flags = [name for name in ("lstrip", "rstrip", "single_word") if token.get(name)]
        if flags and not token["special"]:
            raise InputError(
                f"tokenizer.json: the token {token['content']!r} has {', '.join(flags)}, which "
                "llama.cpp does not do; leave it out"
            )
    if max(texts) >= rows:
        raise InputError(
            f"tokenizer.json: {max(texts) + 1} ids, more than the model's {rows}; export with the "
            "tokenizer it was trained with"
        )
    taken = set(texts.values())
    for index in set(range(rows)) - texts.keys():
        text = f"[PAD{index}]"
        while text in taken:  # llama.cpp aborts if two ids have the same text
            text += "_"
        texts[index], types[index] = text, TokenType.UNUSED
    return [texts[i] for i in range(rows)], [int(types[i]) for i in range(rows)]


def _special(named: Mapping[str, Any], name: str, ids: Mapping[str, int], rows: int) -> int | None:
    """The id of a special token, by its name or by its id; -1 is none, as in older files."""
    token = named.get(name)
    if isinstance(token, dict):
        token = token.get("content")
    if token is not None:
        if not isinstance(token, str) or token not in ids:
            raise InputError(f"tokenizer_config.json: {name} is {token!r:.80}, which is no token")
        return ids[token]
    found = named.get(f"{name}_id")
    several = found if isinstance(found, list) else [found]  # of several EOS ids, the first
    several = [index for index in several if index is not None and index != -1]
    if wrong := [i for i in several if type(i) is not int or not 0 <= i < rows]:
        raise InputError(
            f"config.json: {name}_id: expected an id from 0 to {rows - 1}, found {wrong[0]!r:.80}; "
            "leave it out if the model has no such token"
        )
    return several[0] if several else None
