"""The shard writers of `steps.deduplicate`: sign documents, compare a share of them, drop some.

A document is named by its place: the number of its item, and its row in the item, over all splits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from data.arrays import load_array, save_array
from data.prepare.clusters import clusters, forest, item_and_row, keepers, matches, place_of
from data.prepare.comparison import Comparison
from data.prepare.items import DocumentItem, DocumentWriter, read_documents
from data.prepare.minhash import band_hashes, signatures
from data.read.parquet_table import TableWriter, read_table
from data.select.document_hash import document_hash, text_hash
from data.select.split_writer import COLUMNS
from pipeline.errors import InputError
from pipeline.store import storage
from pipeline.store.parallel import concurrently, in_order

DROPPED = "dropped.parquet"
"""Beside the documents of a shard: id and split of those that were dropped, and their keeper."""

SHARES = 256
"""Most shares of a band: one for each first byte of a key."""

_DOCUMENTS, _BANDS, _EDGES = "documents.parquet", "bands", "edges.npy"
_SIGNED = pa.schema([("id", pa.string()), ("rank", pa.int64())])
_LOST = pa.schema([("row", pa.int64()), ("keeper", pa.string()), ("rank", pa.int64())])
_DROPPED = pa.schema([("id", pa.string()), ("keeper", pa.string()), ("split", pa.string())])


class Share(NamedTuple):
    """A share of some neighbouring bands of all documents."""

    signed: Sequence[str]  # directories of `sign_shard`, in the order of the items
    bands: tuple[int, int]  # the first one, and the one after the last
    share: int
    shares: int


# Of the first four the files are no part of the output, so they have no content.


def sign_shard(directory: str, work: tuple[DocumentItem, Comparison]) -> Mapping[str, Any]:
    """Shard writer: the keys, ids and ranks of an item's documents."""
    item, comparison = work
    # Where invalid rows are skipped, the other columns too decide which rows are documents.
    if not any(unit.skip_invalid for _, units in item.parts for unit in units):
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
    return {"documents": documents, "content": None}


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


def compare_shard(directory: str, work: tuple[Share, Comparison]) -> Mapping[str, Any]:
    """Shard writer: edges between the documents with equal keys."""
    share, comparison = work
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


def merge_shard(directory: str, compared: Sequence[str]) -> Mapping[str, Any]:
    """Shard writer: the forest of several shards' edges."""
    return _save(directory, forest(_edges(directory, compared)))


def _save(directory: str, edges: np.ndarray) -> Mapping[str, Any]:
    save_array(storage.join(directory, _EDGES), edges)
    return {"edges": edges.shape[1], "content": None}


def _edges(directory: str, compared: Sequence[str]) -> np.ndarray:
    files = [storage.join(place, _EDGES) for place in compared]
    return np.concatenate(concurrently(load_array, files, directory), axis=1)


def resolve_shard(directory: str, work: tuple[Sequence[str], Sequence[str]]) -> Mapping[str, Any]:
    """Shard writer: of every item with duplicates the rows to drop, and their keepers.

    The result has `items` with duplicates, `clusters` and documents of the `largest_cluster`.
    """
    compared, signed = work
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
        with TableWriter(_lost_file(directory, number), _LOST) as out:
            out.write(pa.record_batch(batch, schema=_LOST))
    sizes = np.unique(found.roots, return_counts=True)[1]
    return {
        "items": numbers.tolist(),
        "clusters": len(sizes),
        "largest_cluster": int(sizes.max(initial=0)),
        "content": None,
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


def _lost_file(resolved: str, number: int) -> str:
    return storage.join(resolved, f"{number:06d}.parquet")


def unique_shard(
    directory: str, work: tuple[DocumentItem, int, str | None, Comparison]
) -> dict[str, Any]:
    """Shard writer: an item's documents without those to drop, and `DROPPED` with these.

    `work` has the item's number, and the directory that names its rows to drop, if it has any.
    """
    item, number, resolved, comparison = work
    table = _LOST.empty_table()
    if resolved is not None:
        table = pa.Table.from_batches(read_table(_lost_file(resolved, number)))
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
        out.skip(tally)
    return out.result


# A file of keys, from which a share of one band can be read: uint64 [bands, 257], where in the
# records the keys with each first byte begin, and the end of the band; then the records of each
# band (key and row), in the order of the keys' first bytes.


def write_bands(url: str, keys: np.ndarray, rows: np.ndarray) -> None:
    """Write the keys (uint64 [documents, bands, words]) of some rows (int [documents])."""
    documents, bands, words = keys.shape
    ends = np.zeros((bands, SHARES + 1), "<u8")
    orders = []
    for band in range(bands):
        first = (keys[:, band, 0] >> np.uint64(56)).astype(np.uint8)
        orders.append(np.argsort(first, kind="stable"))
        ends[band] = band * documents
        ends[band, 1:] += np.cumsum(np.bincount(first, minlength=SHARES)).astype(np.uint64)
    with storage.open_write(url) as file:
        file.write(ends.tobytes())
        for band, order in enumerate(orders):
            records = np.empty(documents, _record(words))
            records["key"], records["row"] = keys[order, band], rows[order]
            file.write(records.tobytes())


def read_band(
    url: str, band: int, bands: int, words: int, share: int, shares: int
) -> tuple[np.ndarray, np.ndarray]:
    """(uint64 [documents, words] keys, uint32 [documents] rows) of one of a power of two shares."""
    record, width = _record(words), SHARES // shares
    table = 8 * (SHARES + 1)
    with storage.open_read(url) as file:
        file.seek(band * table + 8 * share * width)
        ends = np.frombuffer(file.read(8 * (width + 1)), "<u8")
        begin, end = int(ends[0]), int(ends[-1])
        file.seek(bands * table + begin * record.itemsize)
        found = np.frombuffer(file.read((end - begin) * record.itemsize), record)
    return found["key"].astype(np.uint64), found["row"].astype(np.uint32)


def _record(words: int) -> np.dtype:
    return np.dtype([("key", "<u8", (words,)), ("row", "<u4")])
