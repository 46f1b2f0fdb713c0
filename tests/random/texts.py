"""Random tokenizers on random texts: the ids of `tokenizers`, whoever encodes, whole or in pieces.

A trial makes one tokenizer.json and a few hundred texts. The back end "auto" encodes them without
comparing a sample, long ones in pieces of some hundred bytes, and `tokenizers` encodes each whole.
"""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa

from data.tokenizer import expressions, long_documents
from data.tokenizer.special_tokens import EOS
from data.tokenizer.text_tokenizer import TextTokenizer
from pipeline.errors import InputError
from tests.data.tokenizer.published_shapes import shape, special
from tests.data.tokenizer.split_tokenizers import documents, tokenizer_json
from tests.faults.registry import Fault, trials

TEXTS = 300
_Tree = dict[str, Any]
_FRAGMENTS = (
    *("'s", "'S", "'LL", "\u2019s", "don't", "'\u017f", "'\u212a", "I'VE", "_", "__init__", "-_-"),
    *("\r\n", "\n\n", "   \n  ", "\t", " ", "  ", " \t\n", "\u3000", "\xa0", "\x1c", "\x85"),
    *("\u2028", "\ufeff", "\u200b", "\u200d", "\u180e", "\0", "\U0010ffff", "\ue000"),
    *("\U0001f469\u200d\U0001f469\u200d\U0001f467", "\U0001f3f3\ufe0f\u200d\U0001f308", "\u05e9"),
    *("\u0645\u0631\u062d", "\xe9", "e\u0301", "a\u0308\u0323", "\ufb01", "\u1112\u1161\u11ab"),
    *("1", "12", "1999", "1234567", "3.14", "\u0967\u0968\u0969", "\xbd", "\xb2", "\u2460"),
    *("\u2163", "\u037e", "\u212b", "\u1fef", "\u0130", "\u01c5", "\u02b0", "\u0391\u0392\u03b3"),
    *(" word", "HELLO", "camelCase", "XMLHttp", "stra\xdfe", "\u6f22\u5b57\u304b\u306a", "\u3002"),
    *("-----", "!!!", "...\n\n", "//\n", "\\", "\u2581", "\u0915\u094d\u0937\u093f", EOS, "</s>"),
)
_FOREIGN = (  # expressions that fastokens reads in another way, or might
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s",
    *(r"\w+|[^\w\s]+|\s+", r"\h+|\H", r"\d+|\D+", r"^\s+|\S+$|.", r"(?m)^.*$", r"\b", r"\R|\X"),
    *(r"\p{Lu}?\p{Ll}+|.", r"[[:alpha:]]+|[[:space:]]", r"[\p{L}&&[^a-c]]+", r"[\s\S]{1,7}"),
    *(r"(?i)[a-k]+", r"\A\S+|\S+\z|\s+\Z", r"(?<=\d)(?=(?:\d{3})+$)", r"\p{Han}+|\p{Latin}+"),
)


def _level(draw: random.Random, *, regex: bool) -> _Tree:
    return {
        "type": "ByteLevel",
        "add_prefix_space": draw.random() < 0.15,
        "trim_offsets": draw.random() < 0.5,
        **({} if regex and draw.random() < 0.2 else {"use_regex": regex}),
    }


def _split(draw: random.Random, pattern: _Tree) -> _Tree:
    behaviors = ("MergedWithPrevious", "MergedWithNext", "Contiguous", "Removed")
    odd = draw.random() < 0.1
    return {
        "type": "Split",
        "pattern": pattern,
        "behavior": draw.choice(behaviors) if odd else "Isolated",
        "invert": odd and draw.random() < 0.5,
    }


def _words(draw: random.Random) -> _Tree | None:
    """A pre-tokenizer."""
    kind = draw.random()
    if kind < 0.15:
        return _level(draw, regex=True)
    if kind < 0.17:
        return None
    parts: list[_Tree] = []
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        known = {"Regex": draw.choice(sorted(expressions._KNOWN))}
        foreign = {"Regex": draw.choice(_FOREIGN)}
        text = {"String": draw.choice((" ", "\n", "ab", ".", "[a", "\u2581"))}
        digits = {"type": "Digits", "individual_digits": draw.random() < 0.5}
        rest = {"type": draw.choice(("Punctuation", "Whitespace", "WhitespaceSplit"))}
        kinds = [_split(draw, known), _split(draw, foreign), _split(draw, text), digits, rest]
        parts += draw.choices(kinds, (14, 2, 1, 2, 0.3))
    if draw.random() < 0.95:
        parts.append(_level(draw, regex=draw.random() < 0.2))
    if draw.random() < 0.05:
        draw.shuffle(parts)
    return {"type": "Sequence", "pretokenizers": parts}


def _normalizer(draw: random.Random) -> _Tree | None:
    kinds: tuple[_Tree, ...] = (
        {"type": "NFC"},
        {"type": "NFC"},
        {"type": "Prepend", "prepend": draw.choice(("\u2581", "_"))},
        {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
        {"type": "Replace", "pattern": {"String": "ab"}, "content": "c"},
        {"type": "Replace", "pattern": {"Regex": r"\s+"}, "content": " "},
        {"type": draw.choice(("Lowercase", "NFKC", "NFD", "StripAccents"))},
        {"type": "Strip", "strip_left": True, "strip_right": True},
    )
    if draw.random() < 0.6:
        return None
    chosen = draw.sample(kinds, draw.choice((1, 1, 2)))
    return chosen[0] if len(chosen) == 1 else {"type": "Sequence", "normalizers": chosen}


def _added(draw: random.Random, begin: int) -> list[_Tree]:
    flags = ("lstrip", "rstrip", "single_word", "normalized")
    texts = (
        "<tool>",
        "foo bar",
        "\n\n",
        "  ",
        "e\u0301",
        "\xe9",
        "K",
        "ing",
        "a" * 300,
        ";",
        "def f(",
    )
    found = draw.sample(texts, draw.choice((0, 0, 1, 2, 3)))
    if draw.random() < 0.1:
        found += [f"<|reserved_{n}|>" for n in range(12)]
    return [
        special(
            text,
            begin + number,
            special=draw.random() < 0.3,
            **{flag: draw.random() < 0.15 for flag in flags},
        )
        for number, text in enumerate(found)
    ]


@functools.cache
def _prose() -> tuple[str, ...]:
    return tuple(documents(200))


@functools.cache
def _trained(name: str) -> _Tree:
    return json.loads(tokenizer_json(name) if name in ("gpt2", "o200k") else shape(name))


def tokenizer(draw: random.Random) -> bytes:
    """A tokenizer.json; most are byte-level, and many change texts or are refused."""
    name = draw.choices(
        ("gpt2", "o200k", "llama2", "gemma", "unigram", "wordpiece"), (8, 8, 1, 1, 0.5, 0.2)
    )[0]
    description = json.loads(json.dumps(_trained(name)))
    model = description["model"]
    if name in ("gpt2", "o200k"):
        description["pre_tokenizer"] = _words(draw)
        description["normalizer"] = _normalizer(draw)
        if draw.random() < 0.5:  # other priorities; some merges are never reached
            draw.shuffle(model["merges"])
        if draw.random() < 0.3:
            model["merges"] = model["merges"][: draw.randrange(len(model["merges"]))]
        for flag in ("ignore_merges", "byte_fallback", "fuse_unk"):
            model[flag] = draw.random() < 0.2
        if draw.random() < 0.1:
            model[draw.choice(("continuing_subword_prefix", "end_of_word_suffix"))] = ""
    if isinstance(model["vocab"], dict):
        begin = max([*model["vocab"].values(), *(t["id"] for t in description["added_tokens"])]) + 1
        description["added_tokens"] += _added(draw, begin)
    if name == "wordpiece":
        description["eos_token"] = "[SEP]"
    description["lossy"] = True
    return json.dumps(description).encode()


def _piece(draw: random.Random) -> str:
    kind = draw.random()
    if kind < 0.55:
        return draw.choice(_FRAGMENTS)
    if kind < 0.75:
        top = draw.choice((0x80, 0x250, 0x3000, 0xD800, 0x20000, 0x110000))
        point = draw.randrange(top)
        return "" if 0xD800 <= point < 0xE000 else chr(point) * draw.randint(1, 3)
    prose = draw.choice(_prose())
    begin = draw.randrange(len(prose))
    return prose[begin : begin + draw.randint(1, 80)]


def text(draw: random.Random) -> str:
    """Fragments, prose, or one of them many times."""
    kind = draw.random()
    if kind < 0.6:
        return "".join(_piece(draw) for _ in range(draw.randint(0, 14)))
    if kind < 0.98:
        prose = draw.choice(_prose())
        begin = draw.randrange(len(prose))
        return prose[begin : begin + draw.randint(1, 900)] + _piece(draw)
    repeated = draw.choice((_piece(draw), _piece(draw) + _piece(draw), " ", "ab1 "))
    many = repeated * draw.randint(0, 12_000 // max(1, len(repeated)))
    return draw.choice(_prose())[: draw.randint(0, 6000)] + many + _piece(draw) * 2


def texts(draw: random.Random, count: int) -> list[str]:
    """Texts, of which some have the beginning of the one before: libraries keep what they split."""
    found: list[str] = []
    for _ in range(count):
        made = text(draw)
        if found and draw.random() < 0.1:
            made = found[-1][: draw.randint(0, len(found[-1]))] + made[:200]
        found.append(made)
    return found


def _ids(parts: Any) -> tuple[np.ndarray, np.ndarray]:
    ids, lengths = zip(*parts, strict=True)
    return np.concatenate(ids), np.concatenate(lengths)


def same_ids(seed: int, count: int, workspace: Path) -> dict[str, Any]:
    """The ids of every text are those of `tokenizers` for the whole text."""
    del workspace
    figures = dict.fromkeys(("texts", "characters", "refused", "by_fastokens", "cut"), 0)

    def trial(number: int) -> None:
        draw = random.Random(number)
        try:
            made = TextTokenizer(tokenizer(draw))
        except InputError:
            figures["refused"] += 1
            return
        cuts = draw.random() < 0.2  # which takes longer
        batch = texts(draw, TEXTS // 5 if cuts else TEXTS)
        try:
            want, want_lengths = made.encode_batch(batch)
        except InputError:  # the expression of a pre-tokenizer takes too many steps
            figures["refused"] += 1
            return
        encoder = made.checked(parallel=draw.random() < 0.3)
        sizes = {
            "BATCH_BYTES": draw.choice((400, 2_000)) if cuts else 1 << 20,
            "PIECE_BYTES": draw.choice((60, 500)),
        }
        with mock.patch.multiple(long_documents, **sizes):
            ids, lengths = _ids(
                made.encode_documents([pa.array(batch[:30]), pa.array(batch[30:])], encoder)
            )
        figures["texts"] += len(batch)
        figures["characters"] += sum(map(len, batch))
        figures["by_fastokens"] += len(batch) * (encoder.record()["backend"] == "fastokens")
        figures["cut"] += sum(len(t.encode()) > sizes["BATCH_BYTES"] for t in batch)
        if np.array_equal(ids, want) and np.array_equal(lengths, want_lengths):
            return
        wrong, a, b = [], 0, 0
        for made_text, n, m in zip(batch, lengths, want_lengths, strict=True):
            if ids[a : a + n].tolist() != want[b : b + m].tolist():
                wrong.append(made_text)
            a, b = a + n, b + m
        parts = {
            n: json.loads(made.content)[n] for n in ("normalizer", "pre_tokenizer", "added_tokens")
        }
        shortest = min(wrong, key=len)
        raise AssertionError(
            f"{len(wrong)} texts by {encoder.record()}, of {parts} {sizes}: {shortest[:300]!a}"
        )

    return {"trials": trials(seed, count, trial), **figures}


SUITES = (Fault("texts by random tokenizers", 12, 3_200, same_ids, slow=True),)
