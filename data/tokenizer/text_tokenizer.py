"""Byte-level BPE: training one, and turning text into ids and back.

A tokenizer is the bytes of its `tokenizer.json`; their SHA-256 is its identity. It is byte-level,
so every text has ids and decodes to itself, and each id stands for a known number of UTF-8 bytes,
which is what turns a loss per token into bits per byte.

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
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from data.tokenizer import long_documents
from data.tokenizer.backends import (
    Backend,
    CheckedEncoder,
    Encoder,
    Ids,
    OracleEncoder,
    digest_of,
    fast_encoder,
)
from data.tokenizer.special_tokens import EOS, check_vocab_size, find_eos
from pipeline.errors import CorruptOutput, InputError
from pipeline.store import storage

_EOS_FIELD = "eos_token"
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
    tokenizer.train_from_iterator(iter(texts), trainer=trainer)
    found = tokenizer.get_vocab_size()
    if found < vocab_size:
        raise InputError(
            f"vocab_size={vocab_size}: the text has pairs for {found} entries only; "
            f"train on more text, or ask for {found} or fewer"
        )
    return tokenizer.to_str().encode("utf-8")


class TextTokenizer:
    """A byte-level tokenizer with an EOS token, from the bytes of its `tokenizer.json`.

    Args:
        content: the file's bytes.
        parallel: sets TOKENIZERS_PARALLELISM for this process; None leaves the environment alone.
            One thread costs nothing per core, so workers that each own a core pass False.

    Attributes:
        content: the same tokenizer as other libraries read it, without our "eos_token".

    Raises:
        InputError: not a `tokenizer.json`, not byte-level, with dropout, or EOS cannot be known.
    """

    def __init__(self, content: bytes, *, parallel: bool | None = None) -> None:
        _set_parallel(parallel)
        description = _parse(content)
        self.content: bytes = _without_eos_field(content, description)
        self._tokenizer = _build(self.content)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        special = {t["content"]: t["id"] for t in description["added_tokens"] if t["special"]}
        self.eos_id: int = find_eos(special, description.get(_EOS_FIELD))
        self.digest: str = digest_of(content)
        self._added = tuple(t["content"] for t in description["added_tokens"])
        self._oracle = OracleEncoder(self._tokenizer)
        self._fast: dict[tuple[Backend, bool], Encoder | None] = {}
        self.token_bytes: np.ndarray = _token_bytes(self._tokenizer, description["added_tokens"])

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

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of `ids`; EOS reads as its name, bytes that are not UTF-8 as U+FFFD."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)


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


def _parse(content: bytes) -> dict:
    try:
        description = json.loads(content.decode("utf-8"))
        decoder = (description["decoder"] or {}).get("type")
        dropout = description["model"].get("dropout")
        description["added_tokens"], description["model"]["vocab"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"tokenizer.json: expected the JSON of a tokenizer, found {content[:40]!r}; "
            "give the tokenizer.json of the tokenizers library"
        ) from error
    if decoder != "ByteLevel":
        raise InputError(
            f"tokenizer.json: expected a ByteLevel decoder, found {decoder}; only byte-level "
            "tokenizers have the exact bytes per token that bits per byte needs"
        )
    if dropout:
        raise InputError(
            f"tokenizer.json: found dropout {dropout}, with which a text has other ids each time; "
            "set it to null"
        )
    return description


def _without_eos_field(content: bytes, description: dict) -> bytes:
    """What the libraries read: they refuse a field they do not know."""
    if _EOS_FIELD not in description:
        return content
    known = {name: value for name, value in description.items() if name != _EOS_FIELD}
    return json.dumps(known).encode("utf-8")


def _build(content: bytes) -> Tokenizer:
    try:
        return Tokenizer.from_str(content.decode("utf-8"))
    except Exception as error:  # the library raises nothing more specific
        raise InputError(
            f"tokenizer.json: the tokenizers library refuses it: {error}; export it again"
        ) from error


def _token_bytes(tokenizer: Tokenizer, added_tokens: list[dict]) -> np.ndarray:
    """int32[vocab]: the UTF-8 bytes that each id decodes to, 0 for special tokens and holes."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    sizes = np.zeros(max(vocabulary.values()) + 1, np.int32)
    for token, index in vocabulary.items():
        sizes[index] = len(token)  # the byte-level alphabet has one character per byte
    for token in added_tokens:
        sizes[token["id"]] = 0 if token["special"] else len(token["content"].encode("utf-8"))
    return sizes
