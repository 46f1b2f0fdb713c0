"""Regular expressions that divide a text into words before BPE, by the tokenizer they come from.

`data.tokenizer.text_tokenizer.train` offers `EXPRESSIONS` by name. Libraries read one expression
differently: Oniguruma, the engine of `tokenizers`, takes `{1,3}+` for a repeated group, PCRE2 for a
possessive bound; `^`, `$`, `\\h` and `\\w` differ too. So `fastokens` only gets the tokenizers that
`unknown_part` accepts: those of which all parts are known to be read alike, which
`python -m tests.random --only texts` shows on random texts and on every character.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import Regex, pre_tokenizers

from data.tokenizer.tokenizer_file import BYTE_PIECES, parts

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_LINES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_TAIL = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_LINES}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
EXPRESSIONS = {
    "gpt2": GPT2,
    "cl100k": rf"{_ENDINGS}|{_LETTERS}|\p{{N}}{{1,3}}|{_TAIL}",
    "nanochat": rf"{_ENDINGS}|{_LETTERS}|\p{{N}}{{1,2}}|{_TAIL}",
    "qwen2": rf"{_ENDINGS}|{_LETTERS}|\p{{N}}|{_TAIL}",
    "o200k": (
        rf"{_BEFORE}{_UPPER}*{_LOWER}+{_ENDINGS}?|{_BEFORE}{_UPPER}+{_LOWER}*{_ENDINGS}?"
        rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES}"
    ),
}
"""GPT-2; GPT-4 and Llama 3, with numbers of up to three digits; nanochat, two; Qwen 2, one; GPT-4o.

Those of tiktoken's cl100k_base and of nanochat are written with possessive quantifiers where these
are not; the words are the same."""

_KNOWN = {
    *EXPRESSIONS.values(),
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",  # tiktoken's gpt2
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+",  # nanochat's own
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+",  # tiktoken's cl100k_base until 2024
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_LINES}",  # Qwen 3.5
    rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES}",  # Mistral Nemo
    r"\p{N}{1,3}",  # DeepSeek V3, with the next two
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+"
    "|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*"
    "|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
}
_KNOWN_TYPES = (None, "BPE")


def pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    """The byte-level pre-tokenizer with the expression `name` of `EXPRESSIONS`."""
    if name == "gpt2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    split = pre_tokenizers.Split(Regex(EXPRESSIONS[name]), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([split, level])


def unknown_part(description: Mapping[str, Any]) -> str:
    """The first part of a tokenizer that fastokens may read differently from tokenizers, or ""."""
    model = description["model"]
    if model.get("type") not in _KNOWN_TYPES:
        return f"the model {model['type']}"
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name):
            return f"the model's {name}"
    normalizers = list(parts(description, "normalizer"))
    for part in normalizers:
        literal = part["type"] == "Replace" and "String" in part["pattern"]
        if not literal and part["type"] not in ("NFC", "Prepend"):
            return f"the normalizer {part['type']}"
    if normalizers and any(token.get("normalized") for token in description["added_tokens"]):
        return "a normalizer of added tokens"
    words = list(parts(description, "pre_tokenizer"))
    for number, part in enumerate(words):
        last = number == len(words) - 1
        known = part["type"] == "Digits" or (part["type"] == "ByteLevel" and last)
        if not known and not (part["type"] == "Split" and _is_known(part)):
            pattern = part.get("pattern")
            return f"the pre-tokenizer {part['type']}" + (f" {pattern}" if pattern else "")
    level = bool(words) and words[-1]["type"] == "ByteLevel"
    letters = pre_tokenizers.ByteLevel.alphabet() if level else BYTE_PIECES
    if not (level or model.get("byte_fallback")) or not model["vocab"].keys() >= set(letters):
        return "a model that loses characters"
    return ""


def _is_known(split: Mapping[str, Any]) -> bool:
    if "String" in split["pattern"]:
        return split["behavior"] != "Removed"
    plain = split["behavior"] == "Isolated" and not split.get("invert")
    return plain and split["pattern"].get("Regex") in _KNOWN
