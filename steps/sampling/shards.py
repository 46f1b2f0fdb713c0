"""The shard writers of `steps.sample`: what runs on the workers, and reading what they wrote."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeline import InputError, StepContext
from pipeline.store import storage
from pipeline.store.manifest import Shard

if TYPE_CHECKING:
    import numpy as np

    from data.read.work_units import Unit
    from data.select.hash_histogram import HashHistogram
    from data.select.hash_ranges import BoundaryDocuments, Ranges
    from data.select.row_groups import RowGroupBlock
    from data.select.token_ratio import Cluster


class Filter(NamedTuple):
    """What decides about a document besides its id.

    Attributes:
        seed: of the document hash.
        min_score: documents that score less are dropped; None keeps all.
        keep_hashes: whether duplicates will be looked for.
    """

    seed: int
    min_score: float | None
    keep_hashes: bool


class SurveyItem(NamedTuple):
    """Units to count; the bytes of the files in `verify` are checked first."""

    units: tuple[Unit, ...]
    chosen: Filter
    verify: tuple[str, ...]


class EdgeItem(NamedTuple):
    """The directory of a survey's shard, and the bins whose documents are wanted."""

    directory: str
    bins: np.ndarray


class BlockItem(NamedTuple):
    """Row groups to count; `verify` checks the file's bytes first."""

    block: RowGroupBlock
    chosen: Filter
    verify: bool


class ProbeItem(NamedTuple):
    """Where to look for documents to tokenise: a row group of a unit, or row groups of a block.

    Of a block's row groups the part is every `parts`-th, from number `part`. `tokenizer` is the
    URL and digest of one; `most_bytes` of text are tokenised, one document if it is longer.
    """

    where: tuple[Unit, int] | RowGroupBlock
    chosen: Filter
    tokenizer: tuple[str, str]
    most_bytes: int
    part: int = 0
    parts: int = 1


class SampleItem(NamedTuple):
    """Units to sample: by ranges of the hash, or all of them for one split."""

    units: tuple[Unit, ...]
    splits: Ranges | str
    chosen: Filter


class UniqueItem(NamedTuple):
    """A sampled unit's directory and its rows to leave out, by split."""

    directory: str
    lost: dict[str, np.ndarray]


def survey_shard(directory: str, item: SurveyItem) -> Mapping[str, Any]:
    """Shard writer: counts of some units by hash bin and by length, and each document's hash."""
    import numpy as np

    from data.select.hash_histogram import survey

    for file in item.verify:
        verify(file)
    found, documents = survey(item.units, item.chosen.seed, item.chosen.min_score)
    _save(directory, "bins.npy", np.stack([found.tokens_by_bin, found.documents_by_bin]))
    _save(directory, "lengths.npy", np.stack([found.lengths.values, found.lengths.counts]))
    _save(directory, "documents.npy", documents)
    return {
        "seen": found.seen,
        "documents": found.documents,
        "tokens": found.tokens,
        "bytes": found.text_bytes,
    }


def edge_shard(directory: str, item: EdgeItem) -> Mapping[str, Any]:
    """Shard writer: hash and count of the documents in some bins, out of a survey's."""
    from data.select.hash_histogram import documents_in

    found = documents_in(_load(item.directory, "documents.npy"), item.bins)
    _save(directory, "edge.npy", found)
    return {"documents": found.shape[1]}


def block_shard(directory: str, item: BlockItem) -> Mapping[str, Any]:
    """Shard writer: what the row groups of a block hold, in the result; writes no file."""
    from data.select.row_groups import survey_block

    del directory
    if item.verify:
        verify(item.block.file)
    groups, count = survey_block(item.block, item.chosen.seed, item.chosen.min_score)
    return {"groups": [group.to_json() for group in groups], "row_groups": count}


def probe_shard(directory: str, item: ProbeItem) -> Mapping[str, Any]:
    """Shard writer: some documents tokenised, their counts in the result; writes no file."""
    from data.select.row_groups import RowGroupBlock, block_units, only_group
    from data.select.token_ratio import probe
    from data.tokenizer.text_tokenizer import TextTokenizer

    del directory
    if isinstance(item.where, RowGroupBlock):
        units = block_units(item.where, item.chosen.seed)[0]
    else:
        units = [only_group(*item.where)]
    tokenizer = TextTokenizer.load_once(*item.tokenizer)
    units = units[item.part :: item.parts]
    chosen = item.chosen
    return asdict(probe(units, tokenizer, chosen.seed, chosen.min_score, item.most_bytes))


def sample_shard(directory: str, item: SampleItem) -> Mapping[str, Any]:
    """Shard writer: the documents of some units, a Parquet file per split."""
    from data.select.write_sample import sample_units

    return sample_units(
        item.units,
        item.splits,
        directory,
        seed=item.chosen.seed,
        min_score=item.chosen.min_score,
        keep_hashes=item.chosen.keep_hashes,
    )


def unique_shard(directory: str, item: UniqueItem) -> Mapping[str, Any]:
    """Shard writer: a sampled unit without its duplicates."""
    from data.select.write_sample import drop_rows

    return drop_rows(item.directory, item.lost, directory)


def load_survey(run: StepContext, shard: Shard) -> HashHistogram:
    """What `survey_shard` wrote."""
    from data.select.hash_histogram import HashHistogram
    from data.select.length_histogram import Lengths

    directory = storage.join(run.root, shard.root)
    tokens_by_bin, documents_by_bin = _load(directory, "bins.npy")
    values, counts = _load(directory, "lengths.npy")
    return HashHistogram(
        seen=shard.result["seen"],
        documents=shard.result["documents"],
        tokens=shard.result["tokens"],
        text_bytes=shard.result["bytes"],
        tokens_by_bin=tokens_by_bin,
        documents_by_bin=documents_by_bin,
        lengths=Lengths(values, counts),
    )


def load_edge(run: StepContext, bins: np.ndarray, shards: Iterable[Shard]) -> BoundaryDocuments:
    """What `edge_shard` wrote, of all of them."""
    import numpy as np

    from data.select.hash_ranges import BoundaryDocuments

    parts = [
        _load(storage.join(run.root, shard.root), "edge.npy")
        for shard in shards
        if shard.result["documents"]
    ]
    hashes, counts = np.concatenate([np.empty((2, 0), np.uint64), *parts], axis=1)
    return BoundaryDocuments.of(bins, hashes, counts.astype(np.int64))


def clusters(shards: Mapping[str, Shard]) -> Sequence[Cluster]:
    """What `probe_shard` found."""
    from data.select.token_ratio import Cluster

    return [Cluster.from_json(shard.result) for shard in shards.values()]


def verify(file: str) -> None:
    """Check a file's bytes against the SHA-256 its publisher gives.

    Raises:
        InputError: none is published, or the bytes have another.
    """
    from data.read.sha256sums import expected_checksum, verify_file

    expected = expected_checksum(file)
    if expected is None:
        raise InputError(
            f"{file}: verify_files: expected a SHA-256 published with the file, found none; "
            "publish one, or leave verify_files out"
        )
    verify_file(file, expected)


def _save(directory: str, name: str, array: np.ndarray) -> None:
    import numpy as np

    with storage.open_write(storage.join(directory, name)) as file:
        np.save(file, array, allow_pickle=False)


def _load(directory: str, name: str) -> np.ndarray:
    import numpy as np

    with storage.open_read(storage.join(directory, name)) as file:
        return np.load(file, allow_pickle=False)
