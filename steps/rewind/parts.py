"""What the shards of a token cache hold: which tokens are of which document, and where it is from.

A cache of text has the documents' starts, a packed one is packed again from them, conversations are
encoded again from their source, and rows of integers are one document each.
"""

from __future__ import annotations

import abc
import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeline.errors import InputError, PonenteError
from pipeline.store.manifest import load
from steps.artifacts import TRAIN, Documents, TokenCache
from steps.rewind.source import Origin, check_source, id_in_source, origins, settings_of

if TYPE_CHECKING:
    import numpy as np

    from data.batches.dataset import Piece
    from data.cache.token_shard import TokenShard
    from data.read.integer_rows import RowSpan
    from data.tokenizer.text_tokenizer import TextTokenizer
    from steps.tokens.conversations import ConversationGroup

_KEPT = 64  # shards whose layout is kept in memory


class Held(NamedTuple):
    """Pieces of documents in a shard, by their begin: int64 (n,) each.

    `documents` numbers the documents of the shard's task, and `offsets` has the token of the
    document that a piece begins with.
    """

    begins: np.ndarray
    sizes: np.ndarray
    documents: np.ndarray
    offsets: np.ndarray


class Wanted(NamedTuple):
    """Documents to look for: with one of these ids, with some words, or at a row of a source."""

    ids: tuple[str, ...] = ()
    words: str = ""
    place: tuple[str, int] | None = None


class Part(abc.ABC):
    """The training split of one cache."""

    def __init__(self, cache: TokenCache) -> None:
        self.cache = cache
        self.names = [shard.name for shard in cache.each_shard(f"{TRAIN}/")]
        self.held = functools.lru_cache(_KEPT)(self._held)

    @abc.abstractmethod
    def _held(self, shard: int) -> Held: ...

    @abc.abstractmethod
    def origins(self, shard: int, documents: Sequence[int]) -> list[Origin]:
        """Where documents of a shard came from, in their order."""

    def pieces(self, source: int, shard: int, document: int) -> list[Piece]:
        """The pieces of a document in a shard of this cache, a source of an order."""
        from data.batches.dataset import Piece

        held = self.held(shard)
        at = (held.documents == document).nonzero()[0].tolist()
        return [Piece(source, shard, int(held.begins[n]), int(held.sizes[n])) for n in at]

    def find(self, wanted: Wanted) -> Iterator[tuple[int, int]]:
        """(shard, document) of each document that is wanted."""
        for shard in range(len(self.names)):
            known = sorted(self.held(shard).documents.tolist())
            for document, origin in zip(known, self.origins(shard, known), strict=True):
                reads = wanted.words and wanted.words in self.text(shard, document)
                if reads or (origin.file, origin.row) == wanted.place:
                    yield shard, document

    def text(self, shard: int, document: int) -> str:
        """The text of a document that has no id; empty where the tokens are no text."""
        return ""


def part_of(cache: TokenCache) -> Part:
    if cache.begins:
        return _Conversations(cache)
    return _Text(cache) if cache.has_text else _Integers(cache)


class _Text(Part):
    """Documents of a step, tokenised, and maybe packed."""

    @cached_property
    def _shards(self) -> tuple[TokenShard, ...]:
        return self.cache.unpacked.split(TRAIN)

    @cached_property
    def _documents(self) -> Documents | None:
        path = self.cache.unpacked.input_paths["documents"]
        published = load(path)
        return None if published is None else Documents(path, published)

    def _held(self, shard: int) -> Held:
        import numpy as np

        from data.batches.packing import pack
        from data.cache.token_shard import read_offsets

        offsets = read_offsets(self._shards[shard].directory, self._shards[shard].check)
        if not self.cache.packed:
            numbers = np.arange(len(offsets) - 1)
            return Held(offsets[:-1], np.diff(offsets), numbers, np.zeros_like(numbers))
        length = self.cache.result["sequence_length"]
        packing = pack(offsets, length)
        numbers = np.searchsorted(offsets, packing.starts, side="right") - 1
        begins = packing.rows * length + packing.places
        return Held(begins, packing.lengths, numbers, packing.starts - offsets[numbers])

    @cached_property
    def _files(self) -> dict[str, tuple[str, str]]:
        files = self._documents.files(TRAIN) if self._documents is not None else []
        return {name.rpartition("/")[2]: (name, url) for name, url in files}

    def _file(self, shard: int) -> tuple[str, str, int]:
        """Name of the shard of documents that a shard was made from, its file and row group."""
        _, number, group = self.names[shard].split("/")
        return *self._files[number], int(group)

    def origins(self, shard: int, documents: Sequence[int]) -> list[Origin]:
        if self._documents is None:
            path = self.cache.unpacked.input_paths["documents"]
            why = "the documents that were tokenised are gone, and with them their ids"
            return [Origin(None, path, None, self.names[shard], why) for _ in documents]
        name, url, group = self._file(shard)
        ids, first = _column(url, group, "id"), _rows_before(url, group)
        wanted = [ids[number].as_py() for number in documents]
        try:
            found, why = origins(self._documents, name, wanted), "not found in the source by its id"
        except (PonenteError, OSError, KeyError, IndexError) as error:
            found, why = {}, f"{error}"
        return [
            replace(found[own], id=own)
            if own in found
            else Origin(own, url, first + number, f"{url}: row group {group}", why)
            for own, number in zip(wanted, documents, strict=True)
        ]

    def find(self, wanted: Wanted) -> Iterator[tuple[int, int]]:
        import numpy as np
        import pyarrow as pa
        import pyarrow.compute as pc

        if self._documents is None:
            raise InputError(
                f"{self.cache.path}: the documents that were tokenised are gone, and with them "
                "ids and texts; build them again"
            )
        place, ids = wanted.place, wanted.ids
        if place is not None:
            own = id_in_source(self._documents, place)
            ids = () if own is None else (own,)
        for shard in range(len(self.names) if ids or wanted.words else 0):
            _, url, group = self._file(shard)
            if wanted.words:
                options = pc.MatchSubstringOptions(wanted.words)
                match = pc.call_function("match_substring", [_column(url, group, "text")], options)
            else:
                # A map made several documents of one, with ids that begin with its own.
                own = _column(url, group, "id")
                of = own if place is None else _before_map(own, ids[0])
                match = pc.call_function("is_in", [of], pc.SetLookupOptions(pa.array(ids)))
            for document in np.flatnonzero(match.to_numpy(zero_copy_only=False)).tolist():
                (origin,) = self.origins(shard, [document]) if place else (None,)
                if origin is None or place == (origin.file, origin.row):
                    yield shard, document


def _before_map(ids: Any, own: str) -> Any:
    """Ids in which those that a map made of the document `own` are `own`."""
    import pyarrow.compute as pc

    made = pc.call_function("starts_with", [ids], pc.MatchSubstringOptions(f"{own}/"))
    return pc.call_function("if_else", [made, own, ids])


@functools.lru_cache(maxsize=_KEPT)
def _column(url: str, group: int, name: str) -> Any:
    import pyarrow as pa

    from data.read.parquet_table import read_table

    batches = [batch.column(name) for batch in read_table(url, (name,), (group,))]
    return pa.concat_arrays(batches)


@functools.lru_cache(maxsize=4096)
def _rows_before(url: str, group: int) -> int:
    from data.read.locate import rows_before

    return rows_before(url, "documents", group)


class _Conversations(Part):
    @cached_property
    def _items(self) -> dict[str, ConversationGroup]:
        from data.chat.messages import Exchange, Messages
        from steps.tokens.chat_templates import chat_of
        from steps.tokens.conversations import items_of

        settings, chat = settings_of(self.cache), chat_of(self.cache)
        check_source(self.cache, settings["source"])
        assert chat is not None
        columns = settings["columns"]
        tokenizer = self.cache.tokenizer()
        return items_of(
            settings["source"],
            [(name, share) for name, share in settings["splits"]],
            columns=Messages(**columns) if set(columns) == {"column"} else Exchange(**columns),
            template=chat.template,
            tokenizer=tokenizer.file,
            digest=tokenizer.digest,
            length=settings["sequence_length"],
            seed=settings["seed"],
            skip_invalid=settings["skip_invalid"],
        )

    @functools.lru_cache(maxsize=_KEPT)  # noqa: B019 - a part lives as long as the command
    def _kept(self, shard: int) -> tuple[list[Origin], Held, list[np.ndarray]]:
        import numpy as np

        from data.chat.rows import places
        from data.read.locate import rows_before
        from steps.tokens.conversations import conversations_of

        item = self._items[self.names[shard]]
        found = list(conversations_of(item, Counter()))
        rows, begins = places([each for _, each in found], item.length)
        (span,) = item.spans
        first = rows_before(span.file, span.kind, span.begin)
        numbers = [first + number for (_, number), _ in found]
        known = [Origin(None, span.file, n, f"{span.file}: row {n}") for n in numbers]
        at = rows * item.length + begins
        order, sizes = np.argsort(at), np.array([len(each.ids) for _, each in found])
        held = Held(at[order], sizes[order], order, np.zeros_like(order))
        return known, held, [each.ids for _, each in found]

    @cached_property
    def _tokenizer(self) -> TextTokenizer:
        return self.cache.tokenizer().load()

    def text(self, shard: int, document: int) -> str:
        return self._tokenizer.decode(self._kept(shard)[2][document].tolist())

    def _held(self, shard: int) -> Held:
        return self._kept(shard)[1]

    def origins(self, shard: int, documents: Sequence[int]) -> list[Origin]:
        return [self._kept(shard)[0][number] for number in documents]


class _Integers(Part):
    @cached_property
    def _spans(self) -> list[RowSpan]:
        from data.read.integer_rows import RowFormat
        from steps.tokens.integer_rows import divided_rows

        settings = settings_of(self.cache)
        check_source(self.cache, settings["source"])
        names = ("column", "mask_column", "vocab_size", "padding")
        layout = RowFormat(
            length=settings["sequence_length"], **{name: settings[name] for name in names}
        )
        splits = [(name, rows) for name, rows in settings["splits"]]
        return divided_rows(settings["source"], layout, splits, settings["seed"])[TRAIN]

    def _held(self, shard: int) -> Held:
        import numpy as np

        length = self.cache.result["sequence_length"]
        tokens = self.cache.split(TRAIN)[shard].tokens
        numbers = np.arange(tokens // length)
        return Held(numbers * length, np.full_like(numbers, length), numbers, numbers * 0)

    def origins(self, shard: int, documents: Sequence[int]) -> list[Origin]:
        span = self._spans[shard]
        first = _rows_before(span.file, span.row_group) + span.begin
        where = f"{span.file}: row group {span.row_group}"
        return [
            Origin(None, span.file, first + number, f"{where}, row {span.begin + number}")
            for number in documents
        ]
