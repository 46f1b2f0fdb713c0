"""Parses a `tokenizer.json` and finds the parts of it that change or lose text.

`TextTokenizer` refuses a file whose fields change text; `data.tokenizer.round_trip` then tests for
changes that no field shows. Three changes are accepted, since published tokenizers make them:

- Unicode's composed form (NFC), for example in Qwen's tokenizer;
- U+2581 decoded as a space, in a SentencePiece-like tokenizer;
- one space at the beginning of a document added or removed.

A file may have fields of this project, which the libraries do not read: "eos_token" names the
special token that ends a document, "lossy": true accepts every other change of text, and
"vocab_size" is the size of a vocabulary that is larger than its entries.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from tokenizers import pre_tokenizers

from data.tokenizer.special_tokens import find_eos
from pipeline.errors import InputError

EOS_FIELD, LOSSY_FIELD, SIZE_FIELD = "eos_token", "lossy", "vocab_size"
_FIELDS = (EOS_FIELD, LOSSY_FIELD, SIZE_FIELD)
SPACE = "\u2581"
"""SentencePiece's character for a space."""
LARGEST_ID = (1 << 24) - 1
"""Far above any vocabulary; bounds the memory of arrays with one entry per id."""

_DROPPING = {
    *("BertPreTokenizer", "CharDelimiterSplit", "Whitespace", "WhitespaceSplit"),
    *("UnicodeScripts",),
}
_BYTE_PIECES = tuple(f"<0x{byte:02X}>" for byte in range(256))
_MEMBERS = ("normalizers", "pretokenizers", "decoders")


def parse(content: bytes) -> dict[str, Any]:
    """The parsed content of a `tokenizer.json`.

    Raises:
        InputError: `content` is not a `tokenizer.json`, has dropout, or has invalid ids.
    """
    try:
        description = json.loads(content.decode("utf-8"))
        model = description["model"]
        if not isinstance(vocabulary := model["vocab"], dict | list) or not vocabulary:
            raise ValueError
        added = {token["content"]: token["id"] for token in description["added_tokens"]}
        if any(not isinstance(token["special"], bool) for token in description["added_tokens"]):
            raise ValueError
        pieces = ids_of(description)
        dropout = model.get("dropout")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(
            f"tokenizer.json: expected the JSON of a tokenizer, found {content[:40]!r}; "
            "give the tokenizer.json of the tokenizers library"
        ) from error
    if dropout:
        raise InputError(
            f"tokenizer.json: found dropout {dropout}, which gives a text other ids each time; "
            "set it to null"
        )
    _check_ids({**pieces, **added}, description.get(SIZE_FIELD, 0))
    return description


def ids_of(description: Mapping[str, Any]) -> dict[str, int]:
    """Ids of the model's entries, without added tokens; a Unigram entry's id is its index."""
    vocabulary = description["model"]["vocab"]
    if isinstance(vocabulary, dict):
        return vocabulary
    return {piece: index for index, (piece, _) in enumerate(vocabulary)}


def for_library(content: bytes, description: Mapping[str, Any]) -> bytes:
    """The file in a form that the libraries read correctly.

    They refuse unknown fields. They also change the id of an added token that is not an entry of
    the model but whose id is between those of the entries; such tokens are added to the model.
    """
    pieces = ids_of(description)
    last = max(pieces.values())
    between = {
        token["content"]: token["id"]
        for token in description["added_tokens"]
        if token["id"] < last and token["content"] not in pieces
    }
    if not between and not description.keys() & set(_FIELDS):
        return content
    known = {name: value for name, value in description.items() if name not in _FIELDS}
    if between and isinstance(description["model"]["vocab"], dict):
        known["model"] = {**description["model"], "vocab": {**pieces, **between}}
    return json.dumps(known).encode("utf-8")


def with_fields(
    content: bytes, *, eos_token: str | None, vocab_size: int | None, lossy: bool
) -> bytes:
    """The file with this project's fields set and `eos_token` made a special token.

    If `eos_token` is an entry of the model only, it becomes an added token with the same id.

    Raises:
        InputError: `eos_token` is not in the vocabulary, or that has more than `vocab_size` ids.
    """
    if eos_token is None and vocab_size is None and not lossy:
        return content
    description = parse(content)
    if vocab_size is not None:
        if vocab_size < (found := entries(description)):
            raise InputError(
                f"tokenizer.json: vocab_size={vocab_size:,}: expected at least the {found:,} ids "
                "that the tokenizer has; leave it out, or give the size that it is padded to"
            )
        description[SIZE_FIELD] = vocab_size
    if lossy:
        description[LOSSY_FIELD] = True
    if eos_token is not None:
        description[EOS_FIELD] = eos_token
        _make_special(description, eos_token)
    return json.dumps(description, ensure_ascii=False).encode("utf-8")


def entries(description: Mapping[str, Any]) -> int:
    """One more than the largest id of an entry or added token."""
    ids = [*ids_of(description).values(), *(t["id"] for t in description["added_tokens"])]
    return max(ids) + 1


def eos_of(description: Mapping[str, Any]) -> int:
    """The id that ends a document; see `find_eos`."""
    special = {t["content"]: t["id"] for t in description["added_tokens"] if t["special"]}
    return find_eos(special, description.get(EOS_FIELD))


def is_byte_level(description: Mapping[str, Any]) -> bool:
    """Whether entries are bytes in the alphabet of ByteLevel, one character per byte."""
    return any(part["type"] == "ByteLevel" for part in parts(description.get("decoder")))


def composes(description: Mapping[str, Any]) -> bool:
    """Whether the tokenizer normalizes texts to NFC."""
    return any(part["type"] == "NFC" for part in parts(description.get("normalizer")))


def adds_space(description: Mapping[str, Any]) -> bool:
    """Whether a document may gain or lose a space at its beginning."""
    if not is_byte_level(description):
        return True
    return any(part.get("add_prefix_space") for part in parts(description.get("pre_tokenizer")))


def what_changes(description: Mapping[str, Any]) -> str:
    """The part of the file that changes or loses text in an unaccepted way; "" if none does."""
    for part in parts(description.get("normalizer")):
        if part["type"] != "NFC" and not _writes_spaces(part):
            return f"the normalizer {json.dumps(part)[:80]} changes text"
    for part in parts(description.get("pre_tokenizer")):
        if part["type"] in _DROPPING or "Removed" in str(part.get("behavior", "")):
            return f"the pre-tokenizer {part['type']} drops characters"
    pieces = ids_of(description)
    byte_level = is_byte_level(description)
    needed = sorted(pre_tokenizers.ByteLevel.alphabet()) if byte_level else _BYTE_PIECES
    if not byte_level and not description["model"].get("byte_fallback"):
        kinds = ", ".join(part["type"] for part in parts(description.get("decoder"))) or "none"
        return (
            "expected a ByteLevel decoder or a model with byte_fallback, found the decoder "
            f"{kinds} and a model that loses characters outside of its vocabulary"
        )
    missing = [piece for piece in needed if piece not in pieces]
    if missing:
        return f"{len(missing)} of 256 bytes have no id, {missing[0]!r} among them"
    return ""


def token_bytes(description: Mapping[str, Any]) -> np.ndarray:
    """int32[vocab]: number of UTF-8 bytes that each id stands for; 0 for special and unused ids.

    It is exact for a byte-level tokenizer. For a SentencePiece-like one it includes the space added
    to the beginning of a document; for a lossy one it is the length of the entry, an approximation.
    """
    pieces = ids_of(description)
    added = description["added_tokens"]
    sizes = np.zeros(max(entries(description), description.get(SIZE_FIELD, 0)), np.int32)
    size = len if is_byte_level(description) else _size_of(description)
    for piece, index in pieces.items():
        sizes[index] = size(piece)
    for token in added:
        sizes[token["id"]] = 0 if token["special"] else len(token["content"].encode("utf-8"))
    return sizes


def special_pieces(description: Mapping[str, Any]) -> tuple[str, ...]:
    """Added tokens that are also entries of a Unigram model, so that it finds them in texts."""
    if description["model"].get("type") != "Unigram":
        return ()
    pieces = ids_of(description)
    return tuple(t["content"] for t in description["added_tokens"] if t["content"] in pieces)


def without_scores(content: bytes, names: tuple[str, ...]) -> bytes:
    """The file with such low Unigram scores for `names` that a text never uses them if it can."""
    description = json.loads(content)
    entries = description["model"]["vocab"]
    description["model"]["vocab"] = [[p, -1e6 if p in names else score] for p, score in entries]
    return json.dumps(description).encode("utf-8")


def parts(tree: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """The members of a normalizer, pre-tokenizer or decoder, with nested sequences flattened."""
    waiting = [] if tree is None else [tree]
    while waiting:
        part = waiting.pop(0)
        inner = [part[name] for name in _MEMBERS if name in part]
        if not inner:
            yield part
        waiting[:0] = inner[0] if inner else []


def _check_ids(pieces: Mapping[str, int], size: int) -> None:
    ids = [*pieces.values(), size]
    wrong = [i for i in ids if not isinstance(i, int) or not 0 <= i <= LARGEST_ID]
    if wrong:
        raise InputError(
            f"tokenizer.json: expected ids of 0 to {LARGEST_ID:,}, found {wrong[0]!r}; "
            "export the tokenizer again"
        )
    if len(set(pieces.values())) < len(pieces):
        raise InputError(
            "tokenizer.json: two entries have the same id, so an id has no unique text; "
            "export the tokenizer again"
        )


def _make_special(description: dict[str, Any], name: str) -> None:
    for token in description["added_tokens"]:
        if token["content"] == name:
            token["special"] = True
            return
    index = ids_of(description).get(name)
    if index is None:
        raise InputError(
            f"tokenizer.json: eos={name!r} is not in the vocabulary; expected one of "
            + (", ".join(repr(t["content"]) for t in description["added_tokens"][:20]) or "its own")
        )
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    description["added_tokens"].append({"id": index, "content": name, **flags, "special": True})
    description["added_tokens"].sort(key=lambda token: token["id"])


def _writes_spaces(part: Mapping[str, Any]) -> bool:
    """Whether a normalizer only writes SentencePiece's character for spaces."""
    if part["type"] == "Prepend":
        return part.get("prepend") == SPACE
    if part["type"] != "Replace":
        return False
    return part.get("pattern") == {"String": " "} and part.get("content") == SPACE


def _size_of(description: Mapping[str, Any]) -> Any:
    fallback = bool(description["model"].get("byte_fallback"))
    prefix = description["model"].get("continuing_subword_prefix") or ""

    def size(piece: str) -> int:
        if fallback and piece in _BYTE_PIECES:
            return 1
        if description["model"].get("type") == "WordPiece" and prefix:
            inside = piece.startswith(prefix)
            return len(piece.removeprefix(prefix).encode("utf-8")) + (not inside)
        return len(piece.replace(SPACE, " ").encode("utf-8"))

    return size
