"""The shard writers of `steps.sample`, which run on the workers, and readers of their files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeline import StepContext
from pipeline.store import storage
from pipeline.store.parallel import concurrently, in_order
from pipeline.store.shards import Shard

if TYPE_CHECKING:
    import numpy as np

    from data.read.work_units import Unit
    from data.select.hash_histogram import HashHistogram
    from data.select.hash_ranges import BoundaryDocuments, Ranges
    from data.select.row_groups import RowGroupBlock
    from data.select.token_ratio import Cluster


class Filter(NamedTuple):
    """The settings that decide, with its id, whether a document is sampled.

    Attributes:
        seed: seed of the document hash.
        min_score: documents with a lower score are dropped; None keeps all.
        keep_hashes: whether to write hashes of the texts, to find duplicates later.
    """

    seed: int
    min_score: float | None
    keep_hashes: bool


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
    import numpy as np

    from data.arrays import save_array
    from data.select.hash_histogram import survey

    units, filter = item
    found, documents = survey(units, filter.seed, filter.min_score)
    bins = np.stack([found.tokens_by_bin, found.documents_by_bin])
    save_array(f"{directory}/bins.npy", bins)
    save_array(f"{directory}/documents.npy", documents)
    return {
        "seen": found.seen,
        "documents": found.documents,
        "tokens": found.tokens,
        "bytes": found.text_bytes,
    }


def edge_shard(directory: str, item: tuple[str, np.ndarray]) -> Mapping[str, Any]:
    """Shard writer: hash and count of the documents in some bins of a survey's shard."""
    from data.arrays import load_array, save_array
    from data.select.hash_histogram import documents_in

    surveyed, bins = item
    found = documents_in(load_array(f"{surveyed}/documents.npy"), bins)
    save_array(f"{directory}/edge.npy", found)
    return {"documents": found.shape[1]}


def block_shard(directory: str, item: tuple[RowGroupBlock, Filter]) -> Mapping[str, Any]:
    """Shard writer: counts of a block's row groups, in the result; writes no file."""
    from data.select.row_groups import survey_block

    del directory
    block, filter = item
    groups, count = survey_block(block, filter.seed, filter.min_score)
    return {"groups": [asdict(group) for group in groups], "row_groups": count}


def probe_shard(directory: str, item: ProbeItem) -> Mapping[str, Any]:
    """Shard writer: tokenises some documents, with counts in the result; writes no file."""
    from data.select.row_groups import RowGroupBlock, block_units, only_group
    from data.select.token_ratio import probe
    from data.tokenizer.text_tokenizer import TextTokenizer

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
    from data.select.write_sample import sample_units

    return sample_units(
        item.units,
        item.splits,
        directory,
        seed=item.filter.seed,
        min_score=item.filter.min_score,
        keep_hashes=item.filter.keep_hashes,
        columns=item.units[0].columns,
    )


def load_surveys(run: StepContext, shards: Iterable[Shard]) -> Iterator[HashHistogram]:
    """The counts that each `survey_shard` wrote; a few at a time are in memory."""
    from data.arrays import load_array
    from data.select.hash_histogram import HashHistogram

    def load(shard: Shard) -> HashHistogram:
        tokens, documents = load_array(f"{storage.join(run.root, shard.root)}/bins.npy")
        return HashHistogram(
            seen=shard.result["seen"],
            text_bytes=shard.result["bytes"],
            tokens_by_bin=tokens,
            documents_by_bin=documents,
        )

    return in_order(load, shards, run.root)


def load_edge(run: StepContext, bins: np.ndarray, shards: Iterable[Shard]) -> BoundaryDocuments:
    """The documents that all `edge_shard`s wrote."""
    import numpy as np

    from data.arrays import load_array
    from data.select.hash_ranges import BoundaryDocuments

    urls = [storage.join(run.root, s.root, "edge.npy") for s in shards if s.result["documents"]]
    parts = concurrently(load_array, urls, run.root)
    hashes, counts = np.concatenate([np.empty((2, 0), np.uint64), *parts], axis=1)
    return BoundaryDocuments.of(bins, hashes, counts.astype(np.int64))


def clusters(shards: Mapping[str, Shard]) -> Sequence[Cluster]:
    """The counts that `probe_shard` returned, one cluster per shard."""
    import msgspec

    from data.select.token_ratio import Cluster

    return [msgspec.convert(shard.result, Cluster) for shard in shards.values()]
