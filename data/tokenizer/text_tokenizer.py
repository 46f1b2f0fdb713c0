"""Tokenizers: trains byte-level BPE, encodes text to ids and decodes ids to text.

A tokenizer is the bytes of its `tokenizer.json`, identified by their SHA-256. Every text has ids
and decodes to itself, with the exceptions in `data.tokenizer.tokenizer_file`, and each id stands
for a known number of UTF-8 bytes, which converts a loss per token to bits per byte.

A document begins with BOS and ends with EOS; where the file has no BOS, the EOS that ends a
document begins the next. A text that contains their characters is tokenised as ordinary text, so
that no document can forge a boundary.
"""

from __future__ import annotations

import codecs
import functools
import hashlib
import json
import os
import re
import threading
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.pre_tokenizers import PreTokenizer

from data.tokenizer import expressions, long_documents, tokenizer_file
from data.tokenizer.backends import (
    Backend,
    CheckedEncoder,
    FastEncoder,
    Ids,
    OracleEncoder,
    fast_encoder,
    native,
)
from data.tokenizer.round_trip import check_round_trip
from data.tokenizer.special_tokens import EOS, check_vocab_size
from pipeline.errors import CorruptOutput, InputError
from pipeline.store import storage

_PIECE, _LAST = 1 << 16, 1 << 10  # characters of a piece; of its end, in which a cut is sought
_BETWEEN = re.compile("(?<=[A-Za-z])(?= [A-Za-z])")
_WORD = 1 << 10  # longest word to train on, in characters
MOST_BYTES = (1 << 31) - 1  # of text to train on: the library counts pairs in 32 bits
_CACHED = 4  # tokenizers kept in memory by a process
_CONTEXT = 8  # ids before a continuation: more than the bytes of a character
_read_lock = threading.Lock()


def train(
    texts: Iterable[list[str]],
    vocab_size: int,
    expression: str = "gpt2",
    special_tokens: Sequence[str] = (),
) -> bytes:
    """Train byte-level BPE (Sennrich et al. 2016).

    Args:
        texts: batches of documents, together less than 2 GiB; equal batches give equal bytes.
        expression: name of the one in `EXPRESSIONS` that divides texts into words.
        special_tokens: other special tokens than EOS, which get the ids behind it.
    """
    check_vocab_size(vocab_size)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer = expressions.pre_tokenizer(expression)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS, *special_tokens],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )

    def parts() -> Iterator[list[str]]:
        size = 0
        for batch in texts:
            size += sum(len(text.encode("utf-8")) for text in batch)
            check_training_bytes(size, "train on a sample of it")
            yield _in_pieces(pre_tokenizer, batch)

    tokenizer.train_from_iterator(parts(), trainer=trainer)
    found = tokenizer.get_vocab_size()
    if found < vocab_size:
        raise InputError(
            f"vocab_size={vocab_size}: the text has pairs for {found} entries only; "
            f"train on more text, or ask for {found} or fewer"
        )
    return tokenizer.to_str().encode("utf-8")


def check_training_bytes(size: int, fewer: str) -> None:
    """Raise unless `size` bytes of text have fewer pairs than the library can count."""
    if size > MOST_BYTES:
        raise InputError(
            f"expected at most {MOST_BYTES:,} bytes of text to train a tokenizer on (larger counts "
            f"of a pair of tokens overflow in the tokenizers library), found {size:,}; {fewer}"
        )


def _in_pieces(pre_tokenizer: PreTokenizer, texts: list[str]) -> list[str]:
    """Texts to train on, long ones in pieces: the trainer keeps all words of a text in memory.

    A piece ends before a space between letters, where the pre-tokenizer splits; a text without one
    is cut at the size limit. Words are cut at `_WORD` characters: the trainer's time is quadratic
    in a word's length, and words of thousands of letters do not improve the vocabulary.
    """
    if max(map(len, texts), default=0) <= _WORD:
        return texts
    pieces = (piece for text in texts for piece in _pieces(text))
    return [part for piece in pieces for part in _short_words(pre_tokenizer, piece)]


def _short_words(pre_tokenizer: PreTokenizer, text: str) -> Iterator[str]:
    """The text, cut inside words longer than `_WORD`, not counting a space before a word."""
    begin = 0
    words = pre_tokenizer.pre_tokenize_str(text) if _may_have_long_word(text) else ()
    for _, (first, end) in words:
        first += text[first] == " " and not text[first : first + 2].isspace()
        while end - max(begin, first) > _WORD:
            cut = max(begin, first) + _WORD
            yield text[begin:cut]
            begin = cut
    yield text[begin:]


def _may_have_long_word(text: str) -> bool:
    """Whether over `_WORD` characters contain no space or white space only: a fast pre-check."""
    half, begin = _WORD // 2, 0
    while len(text) - begin > _WORD:
        space = text.rfind(" ", begin, begin + _WORD + 1)
        if space < 0:
            return True
        begin = space + 1
    # A run of `_WORD` contains one of half its length that begins at a multiple of that.
    return any(text[at : at + half].isspace() for at in range(0, len(text) - half + 1, half))


def _pieces(text: str) -> Iterator[str]:
    begin = 0
    while len(text) - begin > _PIECE:
        places = _BETWEEN.finditer(text, begin + _PIECE - _LAST, begin + _PIECE)
        end = max((place.start() for place in places), default=begin + _PIECE)
        yield text[begin:end]
        begin = end
    yield text[begin:]


class TextTokenizer:
    """A tokenizer with an EOS token, from the bytes of its `tokenizer.json`.

    The constructor tests the tokenizer; `data.tokenizer.tokenizer_file` lists what is accepted.
    `content` is the file as other libraries read it, without this project's own fields.
    """

    def __init__(self, content: bytes) -> None:
        description = tokenizer_file.parse(content)
        self.lossy: bool = bool(description.get(tokenizer_file.LOSSY_FIELD))
        if not self.lossy and (found := tokenizer_file.what_changes(description)):
            raise InputError(
                f"tokenizer.json: {found}; take a tokenizer that keeps text, or accept what it "
                "loses with lossy=True"
            )
        self.content: bytes = tokenizer_file.for_library(content, description)
        self._tokenizer = library(self.content)
        for token in description["added_tokens"]:
            found = self._tokenizer.token_to_id(token["content"])
            if found != token["id"]:
                raise InputError(
                    f"tokenizer.json: the added token {token['content']!r} has the id "
                    f"{token['id']} in the file and {found} in the tokenizers library; export the "
                    "tokenizer again"
                )
        self.eos_id: int = tokenizer_file.eos_of(description)
        self.bos_id: int = tokenizer_file.bos_of(description, self._tokenizer, self.eos_id)
        self.digest: str = hashlib.sha256(content).hexdigest()
        self.vocab_size: int = tokenizer_file.size(description)
        self._description = description
        self._added = tuple(t["content"] for t in description["added_tokens"])
        hidden = tokenizer_file.special_pieces(description)
        guard = library(tokenizer_file.without_scores(self.content, hidden)) if hidden else None
        ends = {self.bos_id, self.eos_id}
        check_round_trip(guard or self._tokenizer, description, ends, lossy=self.lossy)
        self._oracle = OracleEncoder(self._tokenizer, guard, hidden)
        self._fast: dict[tuple[Backend, bool], FastEncoder | None] = {}

    @classmethod
    def load(cls, url: str) -> TextTokenizer:
        """The tokenizer in the file at `url`."""
        try:
            return cls(storage.read_bytes(url))
        except FileNotFoundError as error:
            raise InputError(f"{url}: expected a tokenizer.json, found no file") from error
        except InputError as error:
            raise InputError(f"{url}: {error}") from error

    @classmethod
    def load_once(cls, url: str, digest: str, *, parallel: bool | None = None) -> TextTokenizer:
        """The tokenizer at `url`, kept in memory; `CorruptOutput` if it has another digest.

        `parallel` sets TOKENIZERS_PARALLELISM for this process; None does not change it. Workers
        that each own a core pass False.
        """
        if parallel is not None:
            os.environ["TOKENIZERS_PARALLELISM"] = "true" if parallel else "false"
        with _read_lock:
            return _read(url, digest)

    def gives_ids_of(self, other: TextTokenizer) -> bool:
        """Whether both give every text the same ids, even if their files differ."""
        ends = (self.bos_id, self.eos_id) == (other.bos_id, other.eos_id)
        return ends and _of_ids(self.content) == _of_ids(other.content)

    @functools.cached_property
    def pieces(self) -> list[bytes]:
        """The bytes that each id stands for, see `tokenizer_file.pieces`."""
        return tokenizer_file.pieces(self._description, self._tokenizer)

    @functools.cached_property
    def token_bytes(self) -> np.ndarray:
        """int32 [vocab]: number of bytes of text that each id stands for; 0 for special tokens.

        It includes the space that a SentencePiece-like tokenizer adds to the beginning of a
        document, and is an approximation for a lossy one.
        """
        sizes = np.array([len(piece) for piece in self.pieces], np.int32)
        sizes[[t["id"] for t in self._description["added_tokens"] if t["special"]]] = 0
        return sizes

    @functools.cached_property
    def strips_space(self) -> bool:
        """Whether the text of a document is without the space that its first id begins with."""
        spaced = (i for i, piece in enumerate(self.pieces) if piece.startswith(b" "))
        one = next(spaced, None)
        return one is not None and not self._tokenizer.decode([one]).startswith(" ")

    def encode_batch(self, texts: list[str]) -> Ids:
        """Ids of every text, without added tokens; one with a lone surrogate is refused."""
        try:
            return self._oracle.encode(texts)
        except (TypeError, UnicodeError):
            for text in texts:
                _refuse_surrogates(text)
            raise

    def checked(self, backend: Backend = "auto", *, parallel: bool = False) -> CheckedEncoder:
        """An encoder for the documents of one shard; `parallel` lets fastokens use all cores.

        "auto" is fastokens if it is installed and can read this tokenizer.
        """
        choice = (backend, parallel)
        if choice not in self._fast:
            self._fast[choice] = fast_encoder(self.content, backend, parallel=parallel)
        return CheckedEncoder(self._oracle, self._fast[choice], added=self._added)

    def encode_documents(self, texts: Sequence[pa.Array], encoder: CheckedEncoder) -> Iterator[Ids]:
        """Ids of documents (string or large_string arrays), in batches of about a mebibyte."""
        return long_documents.encode_documents(texts, encoder, self._tokenizer)

    def prompt_ids(self, text: str) -> list[int]:
        """Ids of a text that begins a document: BOS, then the text's."""
        return [self.bos_id, *self.encode_batch([text])[0].tolist()]

    def decode(self, ids: Iterable[int], after: Sequence[int] = ()) -> str:
        """The text of `ids` after those before them; special tokens decode to their names."""
        stream = TextStream(self, after)
        return stream.push(ids) + stream.finish()

    def continuation(self, ids: Iterable[int], after: Sequence[int]) -> str:
        """The text of generated ids, without EOS, after the ids of their prompt."""
        return self.decode([i for i in ids if i != self.eos_id], after)


class TextStream:
    """Decodes ids that arrive a few at a time; the texts concatenate to the text of all ids.

    Ids stand for bytes, and a character may be spread over several of them: it is returned when its
    last byte has arrived. Bytes that are not UTF-8 are returned as U+FFFD, by the substitution of
    maximal subparts (Unicode Standard, section 3.9), and change no character around them.

    `after` are the ids before them. Without any but BOS and EOS a document begins, where a
    SentencePiece-like tokenizer has a space that its text has not.
    """

    def __init__(self, tokenizer: TextTokenizer, after: Sequence[int] = ()) -> None:
        self._pieces = tokenizer.pieces
        before = [i for i in after if i not in (tokenizer.bos_id, tokenizer.eos_id)]
        self._begins = tokenizer.strips_space and not before
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder.decode(b"".join(self._pieces[i] for i in before[-_CONTEXT:]))

    def push(self, ids: Iterable[int]) -> str:
        """The text that became complete with these ids."""
        data = b"".join(self._pieces[i] for i in ids)
        if self._begins and data:
            data = data.removeprefix(b" ")
            self._begins = False
        return self._decoder.decode(data)

    def finish(self) -> str:
        """U+FFFD for a character whose end did not arrive; call it after the last ids."""
        return self._decoder.decode(b"", final=True)


@functools.lru_cache(maxsize=_CACHED)
def _read(url: str, digest: str) -> TextTokenizer:
    found = TextTokenizer.load(url)
    if found.digest != digest:
        raise CorruptOutput(
            f"{url}: expected the tokenizer {digest}, found {found.digest}; rebuild the step that "
            "wrote it"
        )
    return found


def _of_ids(content: bytes) -> dict:
    """The parts of a tokenizer.json that determine ids, as the library writes them."""
    parts = ("model", "normalizer", "pre_tokenizer", "added_tokens")
    written = json.loads(Tokenizer.from_str(content.decode("utf-8")).to_str())
    return {name: written[name] for name in parts}


def _refuse_surrogates(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(
            f"text: expected Unicode, found the lone surrogate {text[error.start]!a} at character "
            f"{error.start}; repair the text where it is read"
        ) from error


def library(content: bytes) -> Tokenizer:
    """The library's tokenizer, set to encode special tokens as text and all of a text, unpadded."""
    with native("tokenizer.json: the tokenizers library refuses it: {}; export it again"):
        tokenizer = Tokenizer.from_str(content.decode("utf-8"))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True
        return tokenizer
