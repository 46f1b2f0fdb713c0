"""Parses a `tokenizer.json` and finds the parts of it that change or lose text.

`TextTokenizer` refuses a file whose fields change text; `data.tokenizer.round_trip` then tests for
changes that no field shows. Three changes are accepted, since published tokenizers make them:

- Unicode's composed form (NFC), for example in Qwen's tokenizer;
- U+2581 decoded as a space, in a SentencePiece-like tokenizer;
- one space at the beginning of a document added or removed.

A file may have fields of this project, which the libraries do not read: "eos_token" and "bos_token"
name the special tokens that end and begin a document, "lossy": true accepts every other change of
text, and "vocab_size" is the size of a vocabulary that is larger than its entries.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from tokenizers import Tokenizer

from data.tokenizer.byte_vocabulary import LETTERS
from data.tokenizer.special_tokens import find_eos
from pipeline.errors import InputError

EOS_FIELD, BOS_FIELD, LOSSY_FIELD, SIZE_FIELD = "eos_token", "bos_token", "lossy", "vocab_size"
_FIELDS = (EOS_FIELD, BOS_FIELD, LOSSY_FIELD, SIZE_FIELD)
SPACE = "\u2581"
"""SentencePiece's character for a space."""
LARGEST_ID = (1 << 24) - 1
"""Far above any vocabulary; bounds the memory of arrays with one entry per id."""

_DROPPING = {
    *("BertPreTokenizer", "CharDelimiterSplit", "Whitespace", "WhitespaceSplit"),
    *("UnicodeScripts",),
}
BYTE_PIECES = tuple(f"<0x{byte:02X}>" for byte in range(256))
_PARTS = ("normalizer", "pre_tokenizer", "decoder")
_MEMBERS = ("normalizers", "pretokenizers", "decoders")
_BYTE_OF_LETTER = {ord(letter): byte for byte, letter in enumerate(LETTERS)}
_PROBE = "a"


def parse(content: bytes) -> dict[str, Any]:
    """The parsed content of a `tokenizer.json`, refused where its parts or ids are not valid."""
    try:
        description = json.loads(content.decode("utf-8"))
        model, tokens = description["model"], description["added_tokens"]
        pieces, added = ids_of(description), {token["content"]: token["id"] for token in tokens}
        sound = isinstance(model["vocab"], dict | list) and bool(pieces)
        sound = sound and all(isinstance(token["special"], bool) for token in tokens)
        if not sound or not all(isinstance(text, str) for text in (*pieces, *added)):
            raise ValueError
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
    ids = [*pieces.values(), *(token["id"] for token in tokens), description.get(SIZE_FIELD, 0)]
    if wrong := [i for i in ids if type(i) is not int or not 0 <= i <= LARGEST_ID]:
        raise InputError(
            f"tokenizer.json: expected ids of 0 to {LARGEST_ID:,}, found {wrong[0]!r}; "
            "export the tokenizer again"
        )
    if len({*(named := {**pieces, **added}).values()}) < len(named):
        raise InputError(
            "tokenizer.json: two entries have the same id, so an id has no unique text; "
            "export the tokenizer again"
        )
    for name in _PARTS:
        list(parts(description, name))
    for name, kind in ((EOS_FIELD, str), (LOSSY_FIELD, bool)):
        if not isinstance(found := description.get(name), kind | None):
            raise InputError(
                f"tokenizer.json: {name}: expected {kind.__name__} or null, found {found!r:.60}; "
                "correct it, or leave it out"
            )
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
    content: bytes,
    *,
    eos_token: str | None = None,
    bos_token: str | None = None,
    vocab_size: int | None = None,
    lossy: bool = False,
) -> bytes:
    """The file with this project's fields set and `eos_token`, `bos_token` made special tokens.

    If one is an entry of the model only, it becomes an added token with the same id.
    """
    named = {EOS_FIELD: eos_token, BOS_FIELD: bos_token}
    if not any(named.values()) and vocab_size is None and not lossy:
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
    for field, name in named.items():
        if name is not None:
            description[field] = name
            _make_special(description, field[:3], name)
    return json.dumps(description, ensure_ascii=False).encode("utf-8")


def entries(description: Mapping[str, Any]) -> int:
    """One more than the largest id of an entry or added token."""
    ids = [*ids_of(description).values(), *(t["id"] for t in description["added_tokens"])]
    return max(ids) + 1


def size(description: Mapping[str, Any]) -> int:
    """Ids of the vocabulary, unused ones included."""
    return max(entries(description), description.get(SIZE_FIELD, 0))


def eos_of(description: Mapping[str, Any]) -> int:
    return find_eos(_special(description), description.get(EOS_FIELD))


def bos_of(description: Mapping[str, Any], tokenizer: Tokenizer, eos_id: int) -> int:
    """The id that begins a document: the one that encoding inserts, else the field's, else EOS."""
    special = _special(description)
    before, _ = inserted(tokenizer)
    if len(before) > 1 or not set(before) <= {*special.values()}:
        raise InputError(
            f"tokenizer.json: its post-processor puts the ids {before} before a text; expected "
            "at most one, of a special token; set post_processor to null"
        )
    name = description.get(BOS_FIELD)
    if name is not None and name not in special:
        raise InputError(
            f"tokenizer.json: bos_token is {name!r}, which is no special token; expected one of "
            f"{', '.join(special)}"
        )
    if before:
        return before[0]
    return eos_id if name is None else special[name]


def inserted(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The ids that encoding adds before a text and after it."""
    own = tokenizer.encode(_PROBE, add_special_tokens=False).ids
    ids = tokenizer.encode(_PROBE).ids
    for start in range(len(ids) - len(own) + 1):
        if ids[start : start + len(own)] == own:
            return ids[:start], ids[start + len(own) :]
    raise InputError(
        f"tokenizer.json: its post-processor makes {ids} of {own}; expected tokens before or "
        "after the text's own and no others"
    )


def _special(description: Mapping[str, Any]) -> dict[str, int]:
    return {t["content"]: t["id"] for t in description["added_tokens"] if t["special"]}


def is_byte_level(description: Mapping[str, Any]) -> bool:
    """Whether entries are bytes in the alphabet of ByteLevel, one character per byte."""
    return any(part["type"] == "ByteLevel" for part in parts(description, "decoder"))


def composes(description: Mapping[str, Any]) -> bool:
    """Whether the tokenizer normalizes texts to NFC."""
    return any(part["type"] == "NFC" for part in parts(description, "normalizer"))


def adds_space(description: Mapping[str, Any]) -> bool:
    """Whether a document may gain or lose a space at its beginning."""
    if not is_byte_level(description):
        return True
    return any(part.get("add_prefix_space") for part in parts(description, "pre_tokenizer"))


def what_changes(description: Mapping[str, Any]) -> str:
    """The part of the file that changes or loses text in an unaccepted way; "" if none does."""
    for part in parts(description, "normalizer"):
        if part["type"] != "NFC" and not _writes_spaces(part):
            return f"the normalizer {json.dumps(part)[:80]} changes text"
    for part in parts(description, "pre_tokenizer"):
        if part["type"] in _DROPPING or "Removed" in str(part.get("behavior", "")):
            return f"the pre-tokenizer {part['type']} drops characters"
    pieces = ids_of(description)
    byte_level = is_byte_level(description)
    needed = LETTERS if byte_level else BYTE_PIECES
    if not byte_level and not description["model"].get("byte_fallback"):
        kinds = ", ".join(part["type"] for part in parts(description, "decoder")) or "none"
        return (
            "expected a ByteLevel decoder or a model with byte_fallback, found the decoder "
            f"{kinds} and a model that loses characters outside of its vocabulary"
        )
    missing = [piece for piece in needed if piece not in pieces]
    if missing:
        return f"{len(missing)} of 256 bytes have no id, {missing[0]!r} among them"
    return ""


def pieces(description: Mapping[str, Any], tokenizer: Tokenizer) -> list[bytes]:
    """The bytes that each id stands for: UTF-8 of texts when joined, b"" for an unused id.

    They are exact unless the tokenizer is lossy: then what an id adds to the text of another. A
    special token stands for its name.
    """
    found = [b""] * size(description)
    known = {index: piece for piece, index in ids_of(description).items()}
    if is_byte_level(description):
        texts = map(_bytes_of_letters, known.values())
    elif description["model"].get("byte_fallback"):
        single = {name: bytes([byte]) for byte, name in enumerate(BYTE_PIECES)}
        texts = (single.get(p) or p.replace(SPACE, " ").encode("utf-8") for p in known.values())
    else:
        (first, *_) = known
        before = tokenizer.decode([first], skip_special_tokens=False)
        pairs = tokenizer.decode_batch([[first, i] for i in known], skip_special_tokens=False)
        texts = (pair.removeprefix(before).encode("utf-8") for pair in pairs)
    for index, text in zip(known, texts, strict=True):
        found[index] = text
    space = SPACE if is_byte_level(description) else " "
    for token in description["added_tokens"]:
        found[token["id"]] = token["content"].replace(SPACE, space).encode("utf-8")
    return found


def _bytes_of_letters(piece: str) -> bytes:
    """The bytes of an entry in the alphabet of ByteLevel; other texts are UTF-8."""
    try:
        return piece.translate(_BYTE_OF_LETTER).encode("latin-1")
    except UnicodeEncodeError:
        return piece.encode("utf-8")


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


def parts(description: Mapping[str, Any], name: str) -> Iterator[Mapping[str, Any]]:
    """The members of a normalizer, pre-tokenizer or decoder, with nested sequences flattened.

    Refused unless it is null, or it and all its members are objects with a type.
    """
    tree = description.get(name)
    waiting = [] if tree is None else [tree]
    while waiting:
        part = waiting.pop(0)
        sound = isinstance(part, dict) and isinstance(part.get("type"), str)
        inner = [part[key] for key in _MEMBERS if key in part] if sound else []
        if not sound or not all(isinstance(members, list) for members in inner):
            raise InputError(
                f'tokenizer.json: {name}: expected null or an object with a "type" and lists of '
                f"members, found {part!r:.60}; export it again"
            )
        if not inner:
            yield part
        waiting[:0] = [member for members in inner for member in members]


def _make_special(description: dict[str, Any], kind: str, name: str) -> None:
    for token in description["added_tokens"]:
        if token["content"] == name:
            token["special"] = True
            return
    index = ids_of(description).get(name)
    if index is None:
        raise InputError(
            f"tokenizer.json: {kind}={name!r} is not in the vocabulary; expected one of "
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
