"""Dropping the duplicates of a sample, on the workers if it is large.

A sample of up to `AT_ONCE` documents is compared by the step's body. Of a larger one, a first round
of shards reads each document's hashes once and divides them into shares, and a second round finds
the duplicates of one share each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from data.arrays import load_array, save_array
from data.select import duplicates, write_sample
from data.select.duplicates import TEXT_WORDS, Duplicates, Part, Share, by_share, compare
from pipeline import StepContext
from pipeline.store import storage
from pipeline.store.parallel import concurrently, in_order
from pipeline.store.shards import Shard
from steps.documents.items import in_groups

TEMPORARY = ("divide/", "compare/")
"""Shards of the comparison, which the output does not need."""


class _Place(NamedTuple):
    """Where the hashes of one part are."""

    number: int
    rank: int
    directory: str
    split: str
    documents: int


_Piece = tuple[str, tuple[int, int], tuple[int, int]]
"""The directory of a divided file, and where the texts and ids of one share are in it."""


def drop_duplicates(
    run: StepContext, splits: tuple[str, ...], written: Mapping[str, Shard], by_position: bool
) -> tuple[dict[str, Shard], int]:
    """(shards rewritten without their duplicates, number of documents with a repeated id).

    The first split, train, keeps a copy only if no other has it.
    """
    train, *others = splits
    rank = {name: index for index, name in enumerate((*others, train))}
    parts = [(shard, split) for shard in written.values() for split in shard.result["splits"]]
    places = [
        _Place(
            number,
            rank[split],
            storage.join(run.root, shard.root),
            split,
            shard.result["splits"][split]["documents"],
        )
        for number, (shard, split) in enumerate(parts)
    ]
    found = _find(run, places, by_position)
    lost: dict[str, dict[str, np.ndarray]] = {}
    for number, rows in found.lost.items():
        shard, split = parts[number]
        none = {name: np.empty(0, np.int64) for name in shard.result["splits"]}
        lost.setdefault(shard.name, none)[split] = rows
    items = {
        f"unique/{name.rpartition('/')[2]}": (storage.join(run.root, written[name].root), rows)
        for name, rows in lost.items()
    }
    return run.map(unique_shard, items), found.repeated_ids


def _find(run: StepContext, places: list[_Place], by_position: bool) -> Duplicates:
    documents = sum(place.documents for place in places)
    if documents <= duplicates.AT_ONCE:
        read = in_order(_read, places, run.root)
        return duplicates.find_duplicates(read, by_position=by_position)
    shares = -(-documents // duplicates.AT_ONCE)
    groups = in_groups(places, lambda place: place.documents, duplicates.AT_ONCE)
    items = {f"divide/{n:06d}": (group, shares) for n, group in enumerate(groups)}
    divided = run.map(divide_shard, items).values()

    def pieces(share: int) -> tuple[_Piece, ...]:
        return tuple(
            (
                storage.join(run.root, shard.root),
                tuple(shard.result["texts"][share : share + 2]),
                tuple(shard.result["ids"][share : share + 2]),
            )
            for shard in divided
        )

    work = {f"compare/{share:06d}": (pieces(share), by_position) for share in range(shares)}
    compared = run.map(compare_shard, work)
    urls = [storage.join(run.root, shard.root, "lost.npy") for shard in compared.values()]
    repeated = [shard.result["repeated"] for shard in compared.values()]
    return duplicates.join(zip(in_order(load_array, urls, run.root), repeated, strict=True))


def _read(place: _Place) -> Part:
    hashes = write_sample.read_hashes(place.directory, place.split)
    return Part(place.number, place.rank, hashes)


def divide_shard(directory: str, item: tuple[list[_Place], int]) -> Mapping[str, Any]:
    """Shard writer: the hashes of some parts, share after share; the result has the ends."""
    places, count = item
    shares = by_share(in_order(_read, places, directory), count)
    ends: dict[str, list[int]] = {}
    for name in ("texts", "ids"):
        ends[name] = [0]
        with storage.open_write(storage.join(directory, f"{name}.u64")) as file:
            for share in shares:
                data = getattr(share, name).astype("<u8").tobytes()
                file.write(data)
                ends[name].append(ends[name][-1] + len(data))
    return {**ends, "content": None}  # no part of the output's content


def compare_shard(directory: str, item: tuple[tuple[_Piece, ...], bool]) -> Mapping[str, Any]:
    """Shard writer: part and row of every document of one share that is to be dropped."""

    def load(piece: _Piece) -> Share:
        place, texts, ids = piece
        words = _words(storage.join(place, "texts.u64"), *texts)
        return Share(words.reshape(-1, TEXT_WORDS), _words(storage.join(place, "ids.u64"), *ids))

    pieces, by_position = item
    lost, repeated = compare(concurrently(load, pieces, directory), by_position)
    save_array(storage.join(directory, "lost.npy"), lost)
    return {"repeated": repeated, "content": None}


def _words(url: str, begin: int, end: int) -> np.ndarray:
    with storage.open_read(url) as file:
        file.seek(begin)
        return np.frombuffer(file.read(end - begin), "<u8").astype(np.uint64)


def unique_shard(directory: str, item: tuple[str, dict[str, np.ndarray]]) -> Mapping[str, Any]:
    """Shard writer: a sampled shard without its duplicates, of which it gets the rows by split."""
    return write_sample.drop_rows(*item, directory)
