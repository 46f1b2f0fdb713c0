"""Tokenizers: training byte-level BPE, and turning text into ids and back.

A tokenizer is the bytes of its `tokenizer.json`; their SHA-256 is its identity. One that is trained
here is byte-level: every text has ids and decodes to itself, and each id stands for a known number
of UTF-8 bytes, which is what turns a loss per token into bits per byte. One made elsewhere is held
to the same, but for what `data.tokenizer.tokenizer_file` names.

One special token, EOS, ends a document and nothing else does: a text that contains its characters
is tokenised as characters, so no document can forge a boundary, and encoding adds no token of its
own. Which one it is, the file says in a field of ours, "eos_token", or its well-known name does
(see `data.tokenizer.special_tokens`).

Documents at scale go through `encode_documents`: Arrow arrays, in bounded memory, by the back end
of `checked`.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from data.tokenizer import long_documents, tokenizer_file
from data.tokenizer.backends import (
    Backend,
    CheckedEncoder,
    Encoder,
    Ids,
    OracleEncoder,
    digest_of,
    fast_encoder,
    raise_unless_native,
)
from data.tokenizer.round_trip import check_round_trip
from data.tokenizer.special_tokens import EOS, check_vocab_size
from pipeline.errors import CorruptOutput, InputError
from pipeline.store import storage

_PIECE, _LAST = 1 << 16, 1 << 10  # characters of a piece, and of its end in which it may be cut
_BETWEEN = re.compile("(?<=[A-Za-z])(?= [A-Za-z])")
_WORD = 1 << 10  # characters of a word to learn from
_RUNS = re.compile(r"[^\W\d_]+|\d+|\s+|[^\w\s]+|_+")  # no word of this pre-tokeniser is longer
_CONTEXT = 8  # ids before a continuation that are decoded with it
_KEPT = 4  # tokenizers a process keeps read
_read: OrderedDict[str, TextTokenizer] = OrderedDict()
_read_lock = threading.Lock()


def train(texts: Iterable[list[str]], vocab_size: int) -> bytes:
    """Train byte-level BPE (Sennrich et al. 2016, with the pre-tokeniser of GPT-2).

    Args:
        texts: batches of documents. The same batches give the same bytes.
        vocab_size: number of ids, EOS (id 0) and the 256 bytes included.

    Returns:
        The content of a `tokenizer.json`.

    Raises:
        InputError: `vocab_size` below 257, or the text is too small to yield that many entries.
    """
    check_vocab_size(vocab_size)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(map(_in_pieces, texts), trainer=trainer)
    found = tokenizer.get_vocab_size()
    if found < vocab_size:
        raise InputError(
            f"vocab_size={vocab_size}: the text has pairs for {found} entries only; "
            f"train on more text, or ask for {found} or fewer"
        )
    return tokenizer.to_str().encode("utf-8")


def _in_pieces(texts: list[str]) -> list[str]:
    """Texts to learn from, a long one in pieces: the trainer holds all words of a text at once.

    A piece ends before a space between letters, where this pre-tokeniser splits; a text without
    such a place is cut where the piece is full. So is a word: the trainer takes the square of its
    length, and one of thousands of letters teaches nothing.
    """
    if max(map(len, texts), default=0) <= _WORD:
        return texts
    return [part for text in texts for piece in _pieces(text) for part in _short_words(piece)]


def _short_words(text: str) -> Iterator[str]:
    """The text, cut inside of words longer than `_WORD`."""
    begin = 0
    if _may_have_long_word(text):
        for run in _RUNS.finditer(text):
            while run.end() - max(begin, run.start()) > _WORD:
                end = max(begin, run.start()) + _WORD
                yield text[begin:end]
                begin = end
    yield text[begin:]


def _may_have_long_word(text: str) -> bool:
    """Whether so many characters have no space among them, or are spaces; quick where not."""
    begin = 0
    while len(text) - begin > _WORD:
        space = text.rfind(" ", begin, begin + _WORD + 1)
        if space < 0:
            return True
        begin = space + 1
    return " " * _WORD in text


def _pieces(text: str) -> Iterator[str]:
    begin = 0
    while len(text) - begin > _PIECE:
        places = [
            m.start() for m in _BETWEEN.finditer(text, begin + _PIECE - _LAST, begin + _PIECE)
        ]
        end = places[-1] if places else begin + _PIECE
        yield text[begin:end]
        begin = end
    yield text[begin:]


class TextTokenizer:
    """A tokenizer with an EOS token, from the bytes of its `tokenizer.json`.

    It is tried out when it is loaded; see `data.tokenizer.tokenizer_file` for what is accepted.

    Args:
        content: the file's bytes.
        parallel: sets TOKENIZERS_PARALLELISM for this process; None leaves the environment alone.
            One thread costs nothing per core, so workers that each own a core pass False.

    Attributes:
        content: the same tokenizer as other libraries read it, without our "eos_token".

    Raises:
        InputError: not a `tokenizer.json`, with dropout, one that changes or loses text, or one
            whose EOS cannot be known or can stand in a text.
    """

    def __init__(self, content: bytes, *, parallel: bool | None = None) -> None:
        _set_parallel(parallel)
        description = tokenizer_file.parse(content)
        self.lossy: bool = bool(description.get(tokenizer_file.LOSSY_FIELD))
        if not self.lossy and (found := tokenizer_file.what_changes(description)):
            raise InputError(
                f"tokenizer.json: {found}; take a tokenizer that keeps text, or accept what it "
                "loses with lossy=True"
            )
        self.content: bytes = tokenizer_file.for_library(content, description)
        self._tokenizer = _build(self.content)
        _check_added(self._tokenizer, description["added_tokens"])
        self.eos_id: int = tokenizer_file.eos_of(description)
        self.digest: str = digest_of(content)
        self.byte_level: bool = tokenizer_file.is_byte_level(description)
        self._added = tuple(t["content"] for t in description["added_tokens"])
        hidden = tokenizer_file.special_pieces(description)
        guard = _build(tokenizer_file.without_scores(self.content, hidden)) if hidden else None
        check_round_trip(guard or self._tokenizer, description, self.eos_id, lossy=self.lossy)
        self._oracle = OracleEncoder(self._tokenizer, guard, hidden)
        self._fast: dict[tuple[Backend, bool], Encoder | None] = {}
        self.token_bytes: np.ndarray = tokenizer_file.token_bytes(description)

    @classmethod
    def load(cls, url: str, *, parallel: bool | None = None) -> TextTokenizer:
        """The tokenizer in the file at `url`."""
        try:
            return cls(storage.read_bytes(url), parallel=parallel)
        except FileNotFoundError as error:
            raise InputError(f"{url}: expected a tokenizer.json, found no file") from error
        except InputError as error:
            raise InputError(f"{url}: {error}") from error

    @classmethod
    def load_once(cls, url: str, digest: str, *, parallel: bool | None = None) -> TextTokenizer:
        """The tokenizer with that digest, read from `url` when this process has not done so before.

        Raises:
            CorruptOutput: the file is not the one with that digest.
        """
        _set_parallel(parallel)
        with _read_lock:
            if digest not in _read:
                found = cls.load(url)
                if found.digest != digest:
                    raise CorruptOutput(
                        f"{url}: expected the tokenizer {digest}, found {found.digest}; rebuild "
                        "the step that wrote it"
                    )
                _read[digest] = found
                while len(_read) > _KEPT:
                    _read.popitem(last=False)
            _read.move_to_end(digest)
            return _read[digest]

    def gives_ids_of(self, other: TextTokenizer) -> bool:
        """Whether a text has the same ids with both, whoever wrote their files."""
        return self.eos_id == other.eos_id and _of_ids(self.content) == _of_ids(other.content)

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return len(self.token_bytes)

    def encode_batch(self, texts: list[str]) -> Ids:
        """Ids of every text, with nothing added.

        Returns:
            (uint32 ids of all texts one after the other, int64 number of ids of each text).

        Raises:
            InputError: a text has a lone surrogate, which UTF-8 cannot express.
        """
        try:
            return self._oracle.encode_strings(texts)
        except (TypeError, UnicodeError) as error:
            for text in texts:
                _refuse_surrogates(text)
            raise error

    def checked(self, backend: Backend = "auto", *, parallel: bool = False) -> CheckedEncoder:
        """An encoder for the documents of one shard.

        Args:
            backend: "auto" is fastokens where it is installed and can read this tokenizer.
            parallel: whether fastokens uses all cores.

        Raises:
            InputError: a back end that is asked for by name cannot be had.
        """
        choice = (backend, parallel)
        if choice not in self._fast:
            self._fast[choice] = fast_encoder(self.content, backend, parallel=parallel)
        return CheckedEncoder(self._oracle, self._fast[choice], added=self._added)

    def encode_documents(self, texts: Sequence[pa.Array], encoder: Encoder) -> Iterator[Ids]:
        """Ids of documents, about a mebibyte of text at a time and none divided.

        Args:
            texts: string or large_string arrays without nulls.
            encoder: of this tokenizer; see `checked`.
        """
        return long_documents.encode_documents(texts, encoder, self._tokenizer)

    def decode(self, ids: Sequence[int] | np.ndarray, after: Sequence[int] = ()) -> str:
        """The text of `ids`; EOS reads as its name, bytes that are not UTF-8 as U+FFFD.

        Args:
            ids: what to decode.
            after: what stands before them. A SentencePiece-like tokenizer drops the space that
                begins a text, so the text of a continuation depends on there being something.
        """
        before = [] if self.byte_level else [int(i) for i in after][-_CONTEXT:]
        known = [i for i in before if i != self.eos_id]
        text = self._decode([*known, *(int(i) for i in ids)])
        return text[len(self._decode(known)) :] if known else text

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def _of_ids(content: bytes) -> dict:
    """The parts of a tokenizer.json that ids depend on, without defaults."""
    parts = ("model", "normalizer", "pre_tokenizer", "added_tokens")
    written = json.loads(Tokenizer.from_str(content.decode("utf-8")).to_str())
    return {name: written[name] for name in parts}


def _set_parallel(parallel: bool | None) -> None:
    if parallel is not None:
        os.environ["TOKENIZERS_PARALLELISM"] = "true" if parallel else "false"


def _refuse_surrogates(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(
            f"text: expected Unicode, found the lone surrogate {text[error.start]!a} at character "
            f"{error.start}; mend the text where it is read"
        ) from error


def _check_added(tokenizer: Tokenizer, added: list[dict[str, Any]]) -> None:
    for token in added:
        found = tokenizer.token_to_id(token["content"])
        if found != token["id"]:
            raise InputError(
                f"tokenizer.json: the added token {token['content']!r} has the id {token['id']} in "
                f"the file and {found} in the tokenizers library; export the tokenizer again"
            )


def _build(content: bytes) -> Tokenizer:
    """The library's tokenizer, which encodes all of a text, reads special tokens as text and adds
    none."""
    try:
        tokenizer = Tokenizer.from_str(content.decode("utf-8"))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True
        return tokenizer
    except BaseException as error:  # noqa: BLE001 - a panic in Rust is no Exception
        raise_unless_native(error)  # the library raises nothing more specific, or panics
        raise InputError(
            f"tokenizer.json: the tokenizers library refuses it: {error}; export it again"
        ) from None
