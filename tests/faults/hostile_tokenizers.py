"""A tokenizer.json that changes or loses text, forges EOS, has huge ids or never ends: refused.

Each trial takes one kind; it is refused by one typed line within `SECONDS`.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from data.tokenizer.text_tokenizer import TextTokenizer
from pipeline.errors import InputError
from tests.data.tokenizer.published_shapes import shape, special
from tests.faults.registry import Fault, pick, trials

SECONDS = 20.0
_Tree = dict[str, Any]


def _normalizer(**tree: Any) -> Callable[[_Tree], None]:
    return lambda d: d.update(normalizer=tree)


def _pre_tokenizer(*first: _Tree) -> Callable[[_Tree], None]:
    def change(description: _Tree) -> None:
        last = description["pre_tokenizer"]
        description["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [*first, last]}

    return change


def _split(pattern: str, behavior: str) -> Callable[[_Tree], None]:
    tree = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": False}
    return _pre_tokenizer(tree)


def _without_byte(description: _Tree) -> None:
    del description["model"]["vocab"]["q"]
    description["model"]["merges"] = []
    vocabulary = description["model"]["vocab"]
    description["model"]["vocab"] = {t: i for t, i in vocabulary.items() if len(t) == 1 or i == 0}


def _unknown_is_eos(description: _Tree) -> None:
    _without_byte(description)
    description["model"]["unk_token"] = "<|endoftext|>"
    description["lossy"] = True


def _swallows(description: _Tree) -> None:
    last = max(description["model"]["vocab"].values())
    token = special("<swallow>", last + 1, special=False, lstrip=True, rstrip=True)
    description["added_tokens"].append(token)


def _huge_id(description: _Tree) -> None:
    description["added_tokens"].append(special("<far>", 4_000_000_000))


def _huge_entry(description: _Tree) -> None:
    description["model"]["vocab"]["zq"] = 4_000_000_000


def _negative(description: _Tree) -> None:
    description["added_tokens"][0]["id"] = -1


def _one_id_twice(description: _Tree) -> None:
    description["model"]["vocab"]["zq"] = 5


def _moved_added(description: _Tree) -> None:
    last = max(description["model"]["vocab"].values())
    description["added_tokens"].append(special("<far>", last + 500))


def _no_words(description: _Tree) -> None:
    description["model"]["vocab"] = {}


_CHANGES: dict[str, Callable[[_Tree], None]] = {
    "lower case": _normalizer(type="Lowercase"),
    "compatibility forms": _normalizer(type="NFKC"),
    "a word replaced": _normalizer(type="Replace", pattern={"String": "color"}, content="colour"),
    "accents stripped": _normalizer(type="Sequence", normalizers=[{"type": "StripAccents"}]),
    "white space dropped": _pre_tokenizer({"type": "WhitespaceSplit"}),
    "rare words dropped": _split("xyzzy", "Removed"),
    "an exploding expression": _split(r"(a+)+$|(a|aa)+$|[^a]+", "Isolated"),
    "an added token that swallows spaces": _swallows,
    "a byte without an id": _without_byte,
    "EOS for what is unknown": _unknown_is_eos,
    "a huge id of an added token": _huge_id,
    "a huge id of an entry": _huge_entry,
    "a negative id": _negative,
    "one id twice": _one_id_twice,
    "an added token that has another id": _moved_added,
    "no entries": _no_words,
    "dropout": lambda d: d["model"].update(dropout=0.1),
}


def _nested(draw: random.Random) -> bytes:
    depth = draw.randint(2_000, 200_000)
    return shape("gpt2")[:-1] + b', "x": ' + b"[" * depth + b"]" * depth + b"}"


def _nested_normalizer(draw: random.Random) -> bytes:
    depth = draw.randint(200, 900)
    begin = b'{"type": "Sequence", "normalizers": [' * depth
    description = json.loads(shape("gpt2"))
    description["normalizer"] = "HERE"
    return json.dumps(description).encode().replace(b'"HERE"', begin + b"]}" * depth)


def _wordpiece(draw: random.Random) -> bytes:
    description = json.loads(shape("wordpiece"))
    description["eos_token"] = draw.choice(["[UNK]", "[SEP]"])
    description["lossy"] = description["eos_token"] == "[UNK]"  # which any other character becomes
    return json.dumps(description).encode()


_WHOLE: dict[str, Callable[[random.Random], bytes]] = {
    "deep nesting": _nested,
    "a deep normalizer": _nested_normalizer,
    "WordPiece": _wordpiece,
}
KINDS = (*_CHANGES, *_WHOLE)


def hostile(seed: int, count: int, workspace: Path) -> dict[str, Any]:
    """Every kind is an InputError of one line, in bounded time."""
    del workspace
    slowest = 0.0

    def trial(number: int) -> None:
        nonlocal slowest
        kind = KINDS[pick(number, len(KINDS))]
        if kind in _WHOLE:
            content = _WHOLE[kind](random.Random(number))
        else:
            description = json.loads(shape("gpt2"))
            _CHANGES[kind](description)
            content = json.dumps(description).encode()
        clock = time.monotonic()
        try:
            TextTokenizer(content)
        except InputError as error:
            line = str(error)
        else:
            raise AssertionError(f"{kind}: accepted")
        assert "\n" not in line, f"{kind}: {line}"
        assert len(line) < 500, f"{kind}: {line}"
        slowest = max(slowest, time.monotonic() - clock)
        assert slowest < SECONDS, f"{kind}: {slowest:.1f} s"

    return {
        "trials": trials(seed, count, trial),
        "kinds_tried": min(count, len(KINDS)),
        "slowest_seconds": round(slowest, 2),
    }


FAULTS = {57: [Fault("hostile tokenizers", len(KINDS), 10 * len(KINDS), hostile, slow=False)]}
