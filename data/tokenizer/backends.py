"""Back ends that turn text into ids, and the check of the fast one against the reference.

The `tokenizers` library is the oracle: its ids are correct by definition. `fastokens`, if it is
installed, is eighty times as fast. It gets only tokenizers all parts of which it is known to read
as `tokenizers` does, see `data.tokenizer.expressions`. Before it is used, both encode whole
documents of the same text (`to_compare`), and if one id differs, it is not used at all. Documents
that contain one of these always go to the oracle:

- the text of an added token, around which the libraries strip spaces differently;
- U+180E, which is white space to the regular expressions of only one of them;
- U+017F, a lower-case s, with which only one of them ends a word such as `it's` once more.

Both libraries take Python strings only; a batch is converted in one call.
"""

from __future__ import annotations

import array
import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from importlib.metadata import version
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from tokenizers import Tokenizer

from data.read.values import text_bytes, text_offsets
from data.tokenizer.expressions import unknown_part
from pipeline.errors import InputError

logger = logging.getLogger(__name__)

Backend: TypeAlias = Literal["auto", "tokenizers", "fastokens"]
Ids: TypeAlias = tuple[np.ndarray, np.ndarray]
"""(uint32 concatenated ids of all texts, int64 number of ids of each text)."""

_ALWAYS_ORACLE = ("\u180e".encode(), "\u017f".encode())
_MANY_NEEDLES = 8
_PREFIX = 3  # bytes
_EVEN, _EXOTIC = 16, 8
_SHOWN = 40
_FAILS = (
    "the tokenizers library fails on a text: {}; simplify the regular expression of the "
    "tokenizer's pre-tokenizer, or leave the document out"
)
_COMPARED = 256 << 10  # bytes of documents that are compared, and most characters of one


class OracleEncoder:
    """The `tokenizers` library, set to encode special tokens in a text as ordinary text.

    `guard` is for texts with one of `names`, which the model would produce despite the setting.
    """

    name = "tokenizers"

    def __init__(
        self, tokenizer: Tokenizer, guard: Tokenizer | None = None, names: Sequence[str] = ()
    ) -> None:
        self.version = version("tokenizers")
        self._tokenizer = tokenizer
        self._guard, self._names = guard, tuple(names)

    def encode(self, texts: pa.Array | list[str]) -> Ids:
        """Ids of every text; on several threads unless TOKENIZERS_PARALLELISM is false."""
        texts = texts if isinstance(texts, list) else strings(texts)
        encodings = _encoded(self._tokenizer, texts)
        if self._guard is not None:
            for place, text in enumerate(texts):
                if any(name in text for name in self._names):
                    encodings[place] = _encoded(self._guard, [text])[0]
        # array() reads a list of ids twice as fast as numpy does.
        return _flat([array.array("I", encoding.ids) for encoding in encodings])


class FastEncoder:
    """The `fastokens` library; it encodes a batch on the calling thread, or parallel on all."""

    name = "fastokens"

    def __init__(self, content: bytes, *, parallel: bool = False) -> None:
        import fastokens

        self.version = version("fastokens")
        self._parallel = parallel
        self._tokenizer: Any = fastokens.Tokenizer.from_json_str(content.decode("utf-8"))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode(self, texts: pa.Array) -> Ids:
        encode = self._tokenizer.encode_batch_flat
        batch = strings(texts)
        if not self._parallel:  # a batch of one stays on this thread
            return _flat([encode([text], split_special_tokens=True)[0] for text in batch])
        ids, offsets = encode(batch, split_special_tokens=True)
        return np.frombuffer(ids, "<u4"), np.diff(np.frombuffer(offsets, "<i8"))


def fast_encoder(content: bytes, backend: Backend, *, parallel: bool = False) -> FastEncoder | None:
    """The fast back end; None if it cannot be used, which is an error where it was asked for."""
    if backend == "tokenizers":
        return None
    if unknown := unknown_part(json.loads(content)):
        why = f"it is not known to give the ids of tokenizers with {unknown}"
    else:
        try:
            return FastEncoder(content, parallel=parallel)
        except ImportError:
            why = "it is not installed; install the extra `fast`"
        except BaseException as error:  # noqa: BLE001 - a panic in Rust is no Exception
            raise_unless_native(error)
            why = f"it cannot read this tokenizer: {error}"
    if backend == "fastokens":
        raise InputError(f"backend='fastokens': {why}, or use backend='auto'")
    logger.info("tokenizers encodes alone, not fastokens: %s", why)
    return None


class CheckedEncoder:
    """Encodes documents with the fast back end, if any, unless it gave wrong ids or failed."""

    def __init__(
        self, oracle: OracleEncoder, fast: FastEncoder | None = None, *, added: Sequence[str] = ()
    ) -> None:
        self._oracle, self._fast = oracle, fast
        self._added = tuple(text.encode("utf-8") for text in added)
        self.by_oracle = 0  # documents that only the oracle may encode
        self.difference: str | None = None  # why it encodes everything from here on

    @property
    def is_fast(self) -> bool:
        return self._fast is not None

    def _give_up(self, why: str) -> None:
        self._fast, self.difference = None, why

    def check(self, texts: pa.Array) -> None:
        """Compare the back ends on whole documents; after a difference the fast one is not used."""
        expected, found = self._oracle.encode(texts), self.encode(texts)
        if all(map(np.array_equal, found, expected)):
            return
        pairs = enumerate(zip(_split(expected), _split(found), strict=False))
        place = next((i for i, (a, b) in pairs if not np.array_equal(a, b)), 0)
        self._give_up(f"the ids of {texts[place].as_py()[:_SHOWN]!r}... are not the oracle's")

    def encode(self, texts: pa.Array) -> Ids:
        if not self.is_fast:
            return self._oracle.encode(texts)
        doubtful = self._doubtful(texts)
        if not doubtful.any():
            return self._try(texts) or self._oracle.encode(texts)
        self.by_oracle += int(doubtful.sum())
        sure = texts.filter(pa.array(~doubtful))
        fast = self._try(sure) or self._oracle.encode(sure)
        return _interleave(doubtful, self._oracle.encode(texts.filter(pa.array(doubtful))), fast)

    def record(self) -> dict[str, Any]:
        """What encoded: backend, version, by_oracle, fell_back, difference."""
        used = self._fast or self._oracle
        return {
            "backend": used.name,
            "version": used.version,
            "by_oracle": self.by_oracle,
            "fell_back": self.difference is not None,
            **({"difference": self.difference} if self.difference else {}),
        }

    def _try(self, texts: pa.Array) -> Ids | None:
        assert self._fast is not None
        try:
            return self._fast.encode(texts)
        except InputError:
            raise
        except BaseException as error:  # noqa: BLE001 - a panic in Rust is no Exception
            raise_unless_native(error)
            self._give_up(f"{self._fast.name} failed: {type(error).__name__}: {error}")
            return None

    def _doubtful(self, texts: pa.Array) -> np.ndarray:
        """bool[texts]: which texts only the oracle may encode."""
        found = np.zeros(len(texts), bool)
        data = text_bytes(texts)
        # Search for the first byte alone before the character: much faster, and the byte is rare.
        exotic = [needle for needle in _ALWAYS_ORACLE if needle[:1] in data]
        for needle in (*self._needles, *exotic):
            if needle in data:
                # Search bytes, not strings: a needle may end inside a character.
                found |= [text.is_valid and needle in bytes(text.as_buffer()) for text in texts]
        return found

    @cached_property
    def _needles(self) -> tuple[bytes, ...]:
        """Byte strings, at least one of which is in every text that contains an added token."""
        if len(self._added) <= _MANY_NEEDLES:
            return tuple(sorted(set(self._added)))
        return tuple(sorted({text[:_PREFIX] for text in self._added}))


def to_compare(texts: pa.Array) -> pa.Array:
    """Documents to compare the back ends on: evenly spaced ones, and those of most bytes beyond
    ASCII, 256 KiB together but at least one; only a longer document is not whole."""
    sizes = np.diff(text_offsets(texts))
    if not len(sizes) or texts.null_count:  # which `strings` refuses
        return texts
    exotic = sizes - pc.call_function("utf8_length", [texts]).to_numpy()
    spaced = np.linspace(0, len(sizes) - 1, min(_EVEN, len(sizes))).astype(np.int64)
    most = np.argsort(-exotic, kind="stable")[:_EXOTIC]
    wanted = np.array(list(dict.fromkeys([*most[exotic[most] > 0], *spaced])))
    wanted = wanted[np.argsort(sizes[wanted], kind="stable")]
    count = max(1, int(np.searchsorted(np.cumsum(sizes[wanted]), _COMPARED, side="right")))
    chosen = texts.take(pa.array(wanted[:count]))
    return pc.call_function("utf8_slice_codeunits", [chosen], pc.SliceOptions(0, _COMPARED))


def strings(texts: pa.Array) -> list[str]:
    """The Python strings of an array."""
    if texts.null_count:
        raise InputError(
            f"expected texts, found {texts.null_count} nulls among {len(texts)}; sample documents "
            "with `steps.sample`, which refuses them"
        )
    return texts.to_numpy(zero_copy_only=False).tolist()


def _encoded(tokenizer: Tokenizer, texts: list[str]) -> list[Any]:
    # A text that is no string, or has a lone surrogate, is the caller's error.
    with native(_FAILS, but=(TypeError, UnicodeError)):
        return tokenizer.encode_batch_fast(texts, add_special_tokens=False)


def _flat(parts: Sequence[Any]) -> Ids:
    """Ids of texts from buffers of 4-byte ids, one buffer per text."""
    ids = np.frombuffer(b"".join(parts), "<u4")
    sizes = np.fromiter((memoryview(part).nbytes for part in parts), np.int64, len(parts))
    return ids, sizes // 4


def _split(encoded: Ids) -> Iterator[np.ndarray]:
    ids, lengths = encoded
    return iter(np.split(ids, np.cumsum(lengths)[:-1]) if len(lengths) else [])


def _interleave(where: np.ndarray, these: Ids, others: Ids) -> Ids:
    """Ids of all texts in order: `these` are the texts where `where` is true, `others` the rest."""
    lengths = np.empty(len(where), np.int64)
    lengths[where], lengths[~where] = these[1], others[1]
    one, two = _split(these), _split(others)
    parts = [next(one) if apart else next(two) for apart in where.tolist()]
    return np.concatenate([np.empty(0, np.uint32), *parts]), lengths


@contextmanager
def native(fails: str, but: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """A context in which a library's failure, but for some, is an `InputError` with it in `fails`.

    A panic in Rust is no `Exception`.
    """
    try:
        yield
    except but:
        raise
    except BaseException as error:  # noqa: BLE001 - see above
        raise_unless_native(error)
        raise InputError(fails.format(error)) from None


def raise_unless_native(error: BaseException) -> None:
    """Re-raise `error` unless a library raised it."""
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error
