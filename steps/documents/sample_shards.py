"""The shard writers of `steps.sample`, which run on the workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np

from data.arrays import load_array, save_array
from data.read.unit import Unit
from data.select.hash_histogram import documents_in, survey
from data.select.hash_ranges import Ranges
from data.select.row_groups import RowGroupBlock, block_units, only_group, survey_block
from data.select.token_ratio import probe
from data.select.write_sample import sample_units
from data.tokenizer.text_tokenizer import TextTokenizer


class Filter(NamedTuple):
    """The settings that decide, with its id, whether a document is sampled."""

    seed: int  # of the document hash
    min_score: float | None  # documents with a lower score are dropped
    keep_hashes: bool  # write hashes of the texts, to find duplicates later


class ProbeItem(NamedTuple):
    """The row groups to probe with the tokenizer: one of a unit, or some of a block.

    Of a block's row groups it takes every `parts`-th, from index `part`. `tokenizer` is URL and
    digest; the probe tokenises up to `most_bytes` of text, and at least one document.
    """

    where: tuple[Unit, int] | RowGroupBlock
    filter: Filter
    tokenizer: tuple[str, str]
    most_bytes: int
    part: int = 0
    parts: int = 1


class SampleItem(NamedTuple):
    """Units to sample: by ranges of the hash per split, or all documents for one split."""

    units: tuple[Unit, ...]
    splits: Ranges | str
    filter: Filter


def survey_shard(directory: str, item: tuple[tuple[Unit, ...], Filter]) -> Mapping[str, Any]:
    """Shard writer: counts of some units by hash bin, and every document's hash."""
    units, filter = item
    found, documents = survey(units, filter.seed, filter.min_score)
    save_array(f"{directory}/bins.npy", np.stack([found.tokens_by_bin, found.documents_by_bin]))
    save_array(f"{directory}/documents.npy", documents)
    counts = {name: getattr(found, name) for name in ("seen", "documents", "tokens")}
    return {**counts, "bytes": found.text_bytes}


def edge_shard(directory: str, item: tuple[str, np.ndarray]) -> Mapping[str, Any]:
    """Shard writer: hash and count of the documents in some bins of a survey's shard."""
    surveyed, bins = item
    found = documents_in(load_array(f"{surveyed}/documents.npy"), bins)
    save_array(f"{directory}/edge.npy", found)
    return {"documents": found.shape[1]}


def block_shard(directory: str, item: tuple[RowGroupBlock, Filter]) -> Mapping[str, Any]:
    """Shard writer: counts of a block's row groups, in the result; writes no file."""
    del directory
    block, filter = item
    groups, count = survey_block(block, filter.seed, filter.min_score)
    return {"groups": [asdict(group) for group in groups], "row_groups": count}


def probe_shard(directory: str, item: ProbeItem) -> Mapping[str, Any]:
    """Shard writer: tokenises some documents, with counts in the result; writes no file."""
    del directory
    if isinstance(item.where, RowGroupBlock):
        units = block_units(item.where, item.filter.seed)[0]
    else:
        units = [only_group(*item.where)]
    tokenizer = TextTokenizer.load_once(*item.tokenizer)
    units = units[item.part :: item.parts]
    return asdict(probe(units, tokenizer, item.filter.seed, item.filter.min_score, item.most_bytes))


def sample_shard(directory: str, item: SampleItem) -> Mapping[str, Any]:
    """Shard writer: the sampled documents of some units, one Parquet file per split."""
    return sample_units(
        item.units,
        item.splits,
        directory,
        **item.filter._asdict(),
        columns=item.units[0].columns,
    )
