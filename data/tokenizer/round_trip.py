"""Tests a tokenizer on difficult texts: each must decode to itself, none may have BOS or EOS.

The test takes some milliseconds per load and cannot find a fault that only rare texts trigger;
`data.tokenizer.tokenizer_file` checks the fields of the file.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Set
from typing import Any

from tokenizers import Tokenizer

from data.tokenizer.backends import native
from data.tokenizer.tokenizer_file import SPACE, adds_space, composes, is_byte_level
from pipeline.errors import InputError

_TRIED = 32  # added tokens tested
_LONG = 512  # characters of a run; a regular expression with exponential backtracking fails on it

_TEXTS = (
    "The Quick brown FOX's 12,345.67 jumps; doesn't it? (yes) [no] {maybe} <b> & \"c\" -- #1 @x",
    "def f(x):\n    return x ** 2  # \ttab\n\n\n\tif a != b:\r\n        pass   \n",
    "Straße naïve Ærøskøbing İstanbul ŁÓDŹ ﬁne ½ Ⅳ ² ™ … “quoted” — dash",
    "Καλημέρα Здравствуйте שלום مرحبا नमस्ते สวัสดี 안녕하세요",
    "你好\uff0c世界。 日本語のテキスト \uff46\uff55ll\u3000\uff57idth",
    "👩\u200d👩\u200d👧 🏳\ufe0f\u200d🌈 👍🏽 \U0010ffff \ue000 \u200b\u200e\u202e\ufeff",
    " a  b   c    d     e\t\tf \n g",
    "  two spaces before and after  ",
    "\x00\x01\x7f\x85\u2028\u180e\u00a0end",
    "a" * _LONG + "!",
    " " * _LONG + ".",
    "ab" * (_LONG // 2) + "\n",
    "1" * _LONG,
)
_FAILS = (
    "tokenizer.json: the tokenizers library fails on a short text: {}; simplify the regular "
    "expression of its pre-tokenizer, or export it again"
)
_COMBINING = ("e\u0301 A\u030a n\u0303 o\u0308", "\u212b \u2126 \u1e9b\u0323 \uac00 \u1100\u1161")


def check_round_trip(
    tokenizer: Tokenizer, description: dict[str, Any], ends: Set[int], *, lossy: bool
) -> None:
    """Raise unless texts encode without the ids of BOS and EOS and, if not lossy, decode to
    themselves.
    """
    added = description["added_tokens"]
    names = [token["content"] for token in added if not token["special"]][:_TRIED]
    names += [token["content"] for token in added if token["id"] in ends]
    held = [f"one {name} two{name}  {name}" for name in names]
    texts = [*_TEXTS, *_COMBINING, *held]
    with native(_FAILS):
        encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    for text, ids in zip(texts, (encoding.ids for encoding in encodings), strict=True):
        if forged := ends & {*ids}:
            raise InputError(
                f"tokenizer.json: the text {text[:40]!r} has the id {min(forged)} in it, which "
                "begins or ends a document; name another token that does, in eos= or bos="
            )
        if lossy:
            continue
        with native(_FAILS):
            found = tokenizer.decode(ids, skip_special_tokens=False)
        if not _same(text, found, description):
            raise InputError(
                f"tokenizer.json: it changes text: {_differing(text, found)}; take a tokenizer "
                "that keeps text, or accept what it loses with lossy=True"
            )


def _same(text: str, found: str, description: dict[str, Any]) -> bool:
    """Whether the texts are equal up to the accepted changes."""
    if composes(description):
        text = unicodedata.normalize("NFC", text)
    if not is_byte_level(description):
        text = text.replace(SPACE, " ")
    if text == found or not adds_space(description):
        return text == found
    return text.lstrip(" ") == found.lstrip(" ") and abs(len(text) - len(found)) == 1


def _differing(text: str, found: str) -> str:
    """Excerpts of both texts around their first difference."""
    pairs = enumerate(zip(text, found, strict=False))
    place = next((i for i, (a, b) in pairs if a != b), min(len(text), len(found)))
    begin = max(0, place - 8)
    return f"{text[begin : begin + 24]!r} comes back as {found[begin : begin + 24]!r}"
