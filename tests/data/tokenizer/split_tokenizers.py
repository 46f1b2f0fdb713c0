"""Small byte-level tokenizers of every shape that published models have, trained here."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from data.read import python_docs
from data.tokenizer.expressions import EXPRESSIONS
from data.tokenizer.special_tokens import EOS


def documents(count: int = 100) -> list[str]:
    """Documents of English and code."""
    return python_docs.documents()["text"].to_pylist()[:count]


def _bytes(**settings: Any) -> Any:
    return pre_tokenizers.ByteLevel(**{"add_prefix_space": False, "use_regex": False, **settings})


def _split(pattern: str) -> Any:
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([split, _bytes()])


def _trained(split: Any, normalizer: Any = None, count: int = 100, **model: Any) -> bytes:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        special_tokens=[EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents(count), trainer=trainer)
    description = json.loads(tokenizer.to_str())
    description["model"].update(model)
    if isinstance(normalizer, _CHANGING):
        description["lossy"] = True
    return json.dumps(description).encode()


# As tiktoken has it today. Only tokenizers reads `{1,3}+` as any number of digits.
CL100K_NOW = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
_CHANGING = (normalizers.Lowercase, normalizers.NFKC, normalizers.Strip, normalizers.Prepend)
_MAKE: dict[str, Callable[[], bytes]] = {
    "gpt2": lambda: _trained(_bytes(use_regex=True)),
    "gpt2 split": lambda: _trained(_split(EXPRESSIONS["gpt2"])),
    "llama3": lambda: _trained(_split(EXPRESSIONS["cl100k"]), ignore_merges=True),
    "qwen2": lambda: _trained(_split(EXPRESSIONS["qwen2"]), normalizers.NFC()),
    "o200k": lambda: _trained(_split(EXPRESSIONS["o200k"])),
    "possessive": lambda: _trained(_split(CL100K_NOW)),
    "digits": lambda: _trained(
        pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), _bytes(use_regex=True)]
        )
    ),
    "prefix space": lambda: _trained(_bytes(use_regex=True, add_prefix_space=True)),
    "lower case": lambda: _trained(_bytes(use_regex=True), normalizers.Lowercase()),
    "byte fallback": lambda: _trained(_bytes(use_regex=True), byte_fallback=True),
    "nfkc": lambda: _trained(_bytes(use_regex=True), normalizers.NFKC()),
    "punctuation": lambda: _trained(
        pre_tokenizers.Sequence([pre_tokenizers.Punctuation(), _bytes(use_regex=True)])
    ),
    "never splits": lambda: _trained(
        pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\n{9}"), "isolated"), _bytes()]),
        count=5,
    ),
    "splits by counting": lambda: _trained(_split(r"[\s\S]{1,7}")),
    "strips": lambda: _trained(_bytes(use_regex=True), normalizers.Strip()),
    "prepends": lambda: _trained(_bytes(use_regex=True), normalizers.Prepend("_")),
}

NAMES = tuple(_MAKE)
# fastokens refuses these, or is not known to read them alike; the oracle encodes alone.
UNSUPPORTED = (
    *("nfkc", "punctuation", "strips", "lower case", "possessive"),
    *("never splits", "splits by counting"),
)


@functools.cache
def tokenizer_json(name: str) -> bytes:
    """The tokenizer.json of one of `NAMES`."""
    return _MAKE[name]()
