"""Back ends that turn text into ids, and the check that keeps a fast one honest.

`tokenizers` is the oracle: its ids are the ids. `fastokens`, when it is installed, reads the same
`tokenizer.json` and is some thirty times as fast. It is never taken on trust: of every shard a
sample is encoded by both, and one difference gives the whole shard to the oracle. What it is known
to read differently never reaches it:

- texts of added tokens, whose stripping of spaces around them differs;
- U+180E, which is white space to the regular expressions of one and not of the other.

Both libraries take Python strings only. They are made a batch at a time, in one call (a third of
what a list from Arrow, value by value, costs).
"""

from __future__ import annotations

import array
import hashlib
import logging
from collections.abc import Iterator, Sequence
from functools import cached_property
from importlib.metadata import version
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from tokenizers import Tokenizer

from pipeline.errors import InputError

logger = logging.getLogger(__name__)

Backend: TypeAlias = Literal["auto", "tokenizers", "fastokens"]
Ids: TypeAlias = tuple[np.ndarray, np.ndarray]
"""(uint32 ids of all texts one after the other, int64 number of ids of each text)."""

_ALWAYS_ORACLE = "\u180e"
_MANY_NEEDLES = 8
_PREFIX = 3  # bytes
_EVEN, _EXOTIC = 16, 8
_HEAD = 2048  # characters of a document that are compared
_SAMPLE_BYTES, _SAMPLE_SHARE = 64 << 10, 0.01


class Encoder(Protocol):
    """Turns text into ids and adds nothing."""

    @property
    def name(self) -> str:
        """The library that does it."""
        ...

    @property
    def version(self) -> str:
        """Of that library."""
        ...

    def encode(self, texts: pa.Array) -> Ids:
        """Ids of every text of a string or large_string array without nulls."""
        ...


class OracleEncoder:
    """The `tokenizers` library, set to read special tokens in a text as text.

    Args:
        tokenizer: so set.
        guard: what encodes texts that hold one of `names`; None where `tokenizer` can.
        names: special tokens that the model of `tokenizer` itself would find in a text.
    """

    name = "tokenizers"

    def __init__(
        self, tokenizer: Tokenizer, guard: Tokenizer | None = None, names: Sequence[str] = ()
    ) -> None:
        self.version = version("tokenizers")
        self._tokenizer = tokenizer
        self._guard, self._names = guard, tuple(names)

    def encode(self, texts: pa.Array) -> Ids:
        """Ids of every text; on several threads unless TOKENIZERS_PARALLELISM says no."""
        return self.encode_strings(strings(texts))

    def encode_strings(self, texts: list[str]) -> Ids:
        """Ids of every text of a list."""
        encodings = _encoded(self._tokenizer, texts)
        if self._guard is not None:
            for place, text in enumerate(texts):
                if any(name in text for name in self._names):
                    encodings[place] = _encoded(self._guard, [text])[0]
        # array() reads a list of ids twice as fast as numpy does.
        return _flat([array.array("I", encoding.ids) for encoding in encodings])


class FastEncoder:
    """The `fastokens` library.

    Args:
        content: a `tokenizer.json`.
        parallel: encode a batch on all cores, else on the calling thread.

    Raises:
        ImportError: it is not installed.
        ValueError: it cannot read this tokenizer.
    """

    name = "fastokens"

    def __init__(self, content: bytes, *, parallel: bool = False) -> None:
        import fastokens

        self.version = version("fastokens")
        self._parallel = parallel
        self._tokenizer: Any = fastokens.Tokenizer.from_json_str(content.decode("utf-8"))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode(self, texts: pa.Array) -> Ids:
        """Ids of every text."""
        encode = self._tokenizer.encode_batch_flat
        batch = strings(texts)
        if not self._parallel:  # a batch of one stays on this thread
            return _flat([encode([text], split_special_tokens=True)[0] for text in batch])
        ids, offsets = encode(batch, split_special_tokens=True)
        return np.frombuffer(ids, "<u4"), np.diff(np.frombuffer(offsets, "<i8"))


def fast_encoder(content: bytes, backend: Backend, *, parallel: bool = False) -> Encoder | None:
    """The fast back end for a tokenizer, or None where the oracle is to encode alone.

    Raises:
        InputError: `backend` asks for one that is not installed or cannot read this tokenizer.
    """
    if backend == "tokenizers":
        return None
    try:
        return FastEncoder(content, parallel=parallel)
    except ImportError as error:
        if backend == "fastokens":
            raise InputError(
                "backend='fastokens': it is not installed; install the extra `fast`, or take "
                "backend='auto'"
            ) from error
        return None
    except BaseException as error:
        raise_unless_native(error)
        if backend == "fastokens":
            raise InputError(
                f"backend='fastokens': it cannot read this tokenizer: {error}; take backend='auto'"
            ) from error
        logger.info("fastokens cannot read this tokenizer (%s): tokenizers encodes alone", error)
        return None


class CheckedEncoder:
    """Encodes the documents of one shard, by the fast back end as long as it is right.

    Args:
        oracle: whose ids are right by definition.
        fast: the back end to use; None uses the oracle alone.
        added: texts of the tokenizer's added tokens.

    Attributes:
        checked: documents of which both back ends encoded the head.
        difference: why the oracle took over, naming the first such document; None if it did not.
        by_oracle: documents the oracle encoded because they hold what `fast` is not given.
    """

    def __init__(
        self, oracle: OracleEncoder, fast: Encoder | None = None, *, added: Sequence[str] = ()
    ) -> None:
        self._oracle, self._fast = oracle, fast
        self._added = tuple(text.encode("utf-8") for text in added)
        self.checked = 0
        self.by_oracle = 0
        self.difference: str | None = None

    def check(self, texts: Sequence[pa.Array]) -> None:
        """Compare the back ends on a sample of a shard's documents; see `sample_of`."""
        if self._fast is None:
            return
        places = sample_of(texts)
        heads = _heads(texts, places)
        expected = self._oracle.encode(heads)
        found = self._try(heads)
        if found is not None and not (
            np.array_equal(found[0], expected[0]) and np.array_equal(found[1], expected[1])
        ):
            place = places[_first_difference(expected, found)]
            self.difference = f"the ids of document {place} of the shard are not the oracle's"
        self.checked = len(places)

    def encode(self, texts: pa.Array) -> Ids:
        """Ids of every text."""
        if self._fast is None or self.difference is not None:
            return self._oracle.encode(texts)
        doubtful = self._doubtful(texts)
        if not doubtful.any():
            return self._try(texts) or self._oracle.encode(texts)
        self.by_oracle += int(doubtful.sum())
        sure = texts.filter(pa.array(~doubtful))
        fast = self._try(sure) or self._oracle.encode(sure)
        return _interleave(doubtful, self._oracle.encode(texts.filter(pa.array(doubtful))), fast)

    def record(self) -> dict[str, Any]:
        """What encoded the shard: backend, version, checked, by_oracle, fell_back, difference."""
        fell_back = self.difference is not None
        return {
            "backend": self.name,
            "version": self.version,
            "checked": self.checked,
            "by_oracle": self.by_oracle,
            "fell_back": fell_back,
            **({"difference": self.difference} if fell_back else {}),
        }

    @property
    def name(self) -> str:
        """The library in use: the oracle's once the fast one was wrong."""
        return self._used.name

    @property
    def version(self) -> str:
        """Of that library."""
        return self._used.version

    @property
    def _used(self) -> Encoder:
        return self._oracle if self._fast is None or self.difference is not None else self._fast

    def _try(self, texts: pa.Array) -> Ids | None:
        """The fast back end's ids; None, for this and all later texts, when it fails."""
        assert self._fast is not None
        try:
            return self._fast.encode(texts)
        except InputError:
            raise
        except BaseException as error:  # noqa: BLE001 - a panic in Rust is no Exception
            raise_unless_native(error)
            self.difference = f"{self._fast.name} failed: {type(error).__name__}: {error}"
            return None

    def _doubtful(self, texts: pa.Array) -> np.ndarray:
        """bool[texts]: which texts hold what the fast back end is not given."""
        found = np.zeros(len(texts), bool)
        data = text_bytes(texts)
        # Looking for one byte first: it is so much faster, and this one is rare.
        exotic = _ALWAYS_ORACLE.encode("utf-8")
        needles = (*self._needles, *([exotic] if exotic[:1] in data else []))
        for needle in needles:
            if needle in data:
                # Over bytes: a needle may end inside a character.
                found |= [text.is_valid and needle in bytes(text.as_buffer()) for text in texts]
        return found

    @cached_property
    def _needles(self) -> tuple[bytes, ...]:
        """Byte strings one of which is in every text that holds an added token."""
        if len(self._added) <= _MANY_NEEDLES:
            return tuple(sorted(set(self._added)))
        return tuple(sorted({text[:_PREFIX] for text in self._added}))


def sample_of(texts: Sequence[pa.Array]) -> list[int]:
    """Documents of a shard to check: evenly spaced ones and those with most non-ASCII characters.

    Their heads of 2,048 characters are at most 1 % of the text, or 64 KiB where that is more.

    Args:
        texts: the shard's documents.

    Returns:
        Indices over all arrays, each once.
    """
    sizes = np.concatenate([np.diff(text_offsets(part)) for part in texts] or [np.empty(0)])
    if not len(sizes):
        return []
    lengths = [pc.call_function("utf8_length", [part]) for part in texts]
    characters = np.concatenate([part.to_numpy(zero_copy_only=False) for part in lengths])
    exotic = sizes - characters
    spaced = np.linspace(0, len(sizes) - 1, min(_EVEN, len(sizes))).astype(np.int64)
    most = np.argsort(-exotic, kind="stable")[:_EXOTIC]
    wanted = dict.fromkeys([*spaced[:1], *most[exotic[most] > 0], *spaced])
    budget = max(_SAMPLE_BYTES, int(_SAMPLE_SHARE * sizes.sum()))
    chosen = []
    for place in wanted:
        width = sizes[place] / max(1, characters[place])
        budget -= min(sizes[place], _HEAD * width)
        if budget < 0 and chosen:
            break
        chosen.append(int(place))
    return chosen


def strings(texts: pa.Array) -> list[str]:
    """The Python strings of an array.

    Raises:
        InputError: one is null.
    """
    if texts.null_count:
        raise InputError(
            f"expected texts, found {texts.null_count} nulls among {len(texts)}; sample documents "
            "with `steps.sample`, which refuses them"
        )
    return texts.to_numpy(zero_copy_only=False).tolist()


def text_offsets(texts: pa.Array) -> np.ndarray:
    """int64[texts + 1]: where each text begins in the array's data buffer, in bytes."""
    wide = pa.types.is_large_string(texts.type)
    buffer = texts.buffers()[1]
    if buffer is None or not len(texts):
        return np.zeros(len(texts) + 1, np.int64)
    dtype = np.int64 if wide else np.int32
    offsets = np.frombuffer(buffer, dtype, len(texts) + 1, texts.offset * np.dtype(dtype).itemsize)
    return offsets.astype(np.int64)


def text_bytes(texts: pa.Array) -> bytes:
    """The UTF-8 of all texts, one after the other."""
    offsets = text_offsets(texts)
    buffer = texts.buffers()[2]
    if buffer is None:
        return b""
    return bytes(memoryview(buffer)[int(offsets[0]) : int(offsets[-1])])


def digest_of(content: bytes) -> str:
    """Hex SHA-256: a tokenizer's identity."""
    return hashlib.sha256(content).hexdigest()


def _encoded(tokenizer: Tokenizer, texts: list[str]) -> list[Any]:
    try:
        return tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    except (TypeError, UnicodeError):
        raise  # a text that is none
    except BaseException as error:  # noqa: BLE001 - a panic in Rust is no Exception
        raise_unless_native(error)
        raise InputError(
            f"the tokenizers library fails on a text: {error}; simplify the regular expression of "
            "the tokenizer's pre-tokenizer, or leave the document out"
        ) from None


def _flat(parts: Sequence[Any]) -> Ids:
    """Ids of texts from buffers of 4-byte ids, one buffer a text."""
    ids = np.frombuffer(b"".join(parts), "<u4")
    sizes = np.fromiter((memoryview(part).nbytes for part in parts), np.int64, len(parts))
    return ids, sizes // 4


def _heads(texts: Sequence[pa.Array], places: list[int]) -> pa.Array:
    ends = np.cumsum([len(part) for part in texts])
    heads = [pa.array([], pa.large_string())]
    first = pc.SliceOptions(0, _HEAD)
    for place in places:
        part = int(np.searchsorted(ends, place, side="right"))
        within = place - int(ends[part]) + len(texts[part])
        head = pc.call_function("utf8_slice_codeunits", [texts[part].slice(within, 1)], first)
        heads.append(head.cast(pa.large_string()))
    return pa.concat_arrays(heads)


def _first_difference(expected: Ids, found: Ids) -> int:
    pairs = zip(_split(expected), _split(found), strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if not np.array_equal(a, b)), 0)


def _split(encoded: Ids) -> Iterator[np.ndarray]:
    ids, lengths = encoded
    return iter(np.split(ids, np.cumsum(lengths)[:-1]) if len(lengths) else [])


def _interleave(where: np.ndarray, these: Ids, others: Ids) -> Ids:
    """Ids of texts of which those at `where` were encoded apart from the others."""
    lengths = np.empty(len(where), np.int64)
    lengths[where], lengths[~where] = these[1], others[1]
    one, two = _split(these), _split(others)
    parts = [next(one) if apart else next(two) for apart in where.tolist()]
    return np.concatenate([np.empty(0, np.uint32), *parts]), lengths


def raise_unless_native(error: BaseException) -> None:
    """Raise `error`, which was caught, unless a library raised it; a panic is no `Exception`."""
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error
