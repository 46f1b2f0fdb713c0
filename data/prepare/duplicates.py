"""The parts of deduplication: signs documents, compares a share of them, finds what to drop.

Each part is one task's. A document is named by its place: the number of its item, and its row in
the item, over all splits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from data.arrays import load_array, save_array
from data.prepare.band_file import read_band, write_bands
from data.prepare.clusters import clusters, forest, item_and_row, keepers, matches, place_of
from data.prepare.comparison import Comparison
from data.prepare.items import DocumentItem, read_documents
from data.prepare.minhash import band_hashes, signatures
from data.prepare.write import DocumentWriter
from data.read.parquet_table import TableWriter, read_table
from data.read.work_units import INVALID, NULL
from data.select.document_hash import document_hash, text_hash
from data.select.split_writer import COLUMNS
from pipeline.errors import InputError
from pipeline.store import storage
from pipeline.store.parallel import concurrently, in_order

DROPPED = "dropped.parquet"
"""Beside the documents of a shard: id and split of those that were dropped, and their keeper."""

_DOCUMENTS, _BANDS, _EDGES = "documents.parquet", "bands", "edges.npy"
_SIGNED = pa.schema([("id", pa.string()), ("rank", pa.int64())])
_LOST = pa.schema([("row", pa.int64()), ("keeper", pa.string()), ("rank", pa.int64())])
_DROPPED = pa.schema([("id", pa.string()), ("keeper", pa.string()), ("split", pa.string())])


class Share(NamedTuple):
    """A share of some neighbouring bands of all documents.

    Attributes:
        signed: directories that `sign` wrote, in the order of the items.
        bands: the first one, and the one after the last.
    """

    signed: Sequence[str]
    bands: tuple[int, int]
    share: int
    shares: int


def sign(directory: str, item: DocumentItem, comparison: Comparison) -> int:
    """Write the keys of an item's documents, their ids and ranks; returns their number.

    Raises:
        InputError: the values of the column cannot be compared.
    """
    item = item._replace(columns=tuple(dict.fromkeys((*COLUMNS, comparison.by))))
    keys = [np.empty((0, comparison.bands, comparison.words), np.uint64)]
    rows = [np.empty(0, np.int64)]
    documents = 0
    with TableWriter(storage.join(directory, _DOCUMENTS), _SIGNED) as out:
        for split, batch in read_documents(item):
            ranks = pa.array(np.full(batch.num_rows, comparison.ranks[split]))
            out.write(pa.record_batch([batch.column("id"), ranks], schema=_SIGNED))
            column = batch.column(comparison.by)
            keys.append(_keys(column, split, comparison))
            valid = column.is_valid().to_numpy(zero_copy_only=False)
            rows.append(documents + np.flatnonzero(valid))
            documents += batch.num_rows
    write_bands(storage.join(directory, _BANDS), np.concatenate(keys), np.concatenate(rows))
    return documents


def _keys(column: pa.Array, split: str, comparison: Comparison) -> np.ndarray:
    """uint64 [documents, bands, words] of those documents that have a value."""
    try:
        values = column.drop_null().cast(pa.string())
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        raise InputError(
            f"by={comparison.by!r}: expected a column of text, numbers or times, found "
            f"{column.type}; name another one"
        ) from None
    if method := comparison.near:
        signed = signatures(values, method.ngram, method.permutations)
        keys = band_hashes(signed, method.bands)[:, :, None]
    else:
        keys = np.frombuffer(b"".join(text_hash(values)), "<u8").astype(np.uint64).reshape(-1, 1, 2)
    return keys if comparison.across else keys ^ document_hash([split], 0)


def compare(directory: str, share: Share, comparison: Comparison) -> int:
    """Write edges between the documents with equal keys; returns their number."""
    bands, words = comparison.bands, comparison.words
    edges = np.empty((2, 0), np.uint64)
    for band in range(*share.bands):

        def read(signed: str, band: int = band) -> tuple[np.ndarray, np.ndarray]:
            url = storage.join(signed, _BANDS)
            return read_band(url, band, bands, words, share.share, share.shares)

        parts = concurrently(read, share.signed, directory)
        keys = np.concatenate([part for part, _ in parts])
        places = np.concatenate([place_of(n, rows) for n, (_, rows) in enumerate(parts)])
        del parts
        edges = forest(np.concatenate([edges, matches(keys, places)], axis=1))
    return _save(directory, edges)


def merge(directory: str, compared: Sequence[str]) -> int:
    """Write the forest of the edges that `compare` and `merge` wrote to some directories."""
    return _save(directory, forest(_edges(directory, compared)))


def _save(directory: str, edges: np.ndarray) -> int:
    save_array(storage.join(directory, _EDGES), edges)
    return edges.shape[1]


def _edges(directory: str, compared: Sequence[str]) -> np.ndarray:
    files = [storage.join(place, _EDGES) for place in compared]
    return np.concatenate(concurrently(load_array, files, directory), axis=1)


def resolve(directory: str, compared: Sequence[str], signed: Sequence[str]) -> Mapping[str, Any]:
    """Write, for every item with duplicates, the rows to drop and their keepers.

    Returns:
        `items` with duplicates to drop, `clusters` and documents of the `largest_cluster`.
    """
    found = clusters(_edges(directory, compared))
    items, rows = item_and_row(found.places)
    hashes, ranks = [np.empty(0, np.uint64)], [np.empty(0, np.int64)]
    for table in _documents(directory, signed, items, rows):
        hashes.append(document_hash(table["id"].combine_chunks(), 0))
        ranks.append(table["rank"].to_numpy())
    rank = np.concatenate(ranks)
    kept = keepers(found, rank, np.concatenate(hashes))
    lost = np.flatnonzero(kept != np.arange(len(kept)))
    unique = np.unique(kept[lost])  # few, so that only their ids are held
    tables = _documents(directory, signed, items[unique], rows[unique])
    ids = pa.concat_tables([_SIGNED.empty_table(), *tables])["id"]
    numbers, begins = np.unique(items[lost], return_index=True)
    for number, own in zip(numbers.tolist(), np.split(lost, begins)[1:], strict=True):
        keeper = ids.take(pa.array(np.searchsorted(unique, kept[own]))).combine_chunks()
        batch = [pa.array(rows[own]), keeper, pa.array(rank[kept[own]])]
        with TableWriter(lost_file(directory, number), _LOST) as out:
            out.write(pa.record_batch(batch, schema=_LOST))
    sizes = np.unique(found.roots, return_counts=True)[1]
    return {
        "items": numbers.tolist(),
        "clusters": len(sizes),
        "largest_cluster": int(sizes.max(initial=0)),
    }


def _documents(
    directory: str, signed: Sequence[str], items: np.ndarray, rows: np.ndarray
) -> Iterator[pa.Table]:
    """Ids and ranks of some documents, a table for each item, of which `items` are ascending."""
    numbers, begins = np.unique(items, return_index=True)

    def read(part: tuple[int, np.ndarray]) -> pa.Table:
        number, own = part
        url = storage.join(signed[number], _DOCUMENTS)
        return pa.Table.from_batches(read_table(url)).take(pa.array(own))

    parts = zip(numbers.tolist(), np.split(rows, begins)[1:], strict=True)
    return in_order(read, parts, directory)


def lost_file(directory: str, number: int) -> str:
    """Where `resolve` writes what an item loses."""
    return storage.join(directory, f"{number:06d}.parquet")


def without_duplicates(
    directory: str, item: DocumentItem, lost: str | None, comparison: Comparison
) -> dict[str, Any]:
    """Write an item's documents without the rows in the file `lost`, and `DROPPED` with these.

    Returns the result of the `DocumentWriter`.
    """
    table = _LOST.empty_table()
    if lost is not None:
        table = pa.Table.from_batches(read_table(lost))
    rows = table["row"].to_numpy()
    names = {rank: split for split, rank in comparison.ranks.items()}
    splits = np.array([names[rank] for rank in table["rank"].to_pylist()], object)
    begin, tally = 0, Counter[str]()
    with (
        DocumentWriter(directory) as out,
        TableWriter(storage.join(directory, DROPPED), _DROPPED) as dropped,
    ):
        for split, batch in read_documents(item, tally):
            low, high = np.searchsorted(rows, [begin, begin + batch.num_rows])
            gone = rows[low:high] - begin
            begin += batch.num_rows
            keep = np.ones(batch.num_rows, bool)
            keep[gone] = False
            out.write(split, batch.filter(pa.array(keep)))
            for keeper in dict.fromkeys(splits[low:high]):
                some = gone[splits[low:high] == keeper]
                out.drop(comparison.reason(split, keeper), batch.take(pa.array(some)))
            ids = batch.column("id").take(pa.array(gone))
            kept = table["keeper"].slice(low, high - low).combine_chunks()
            columns = [ids, kept, pa.array([split] * len(gone), pa.string())]
            dropped.write(pa.record_batch(columns, schema=_DROPPED))
        for reason in (NULL, INVALID):
            out.skip(reason, tally[reason])
    return out.result
