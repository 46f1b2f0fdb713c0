"""Which documents `steps.sample` takes: ranges of the document hash, or whole row groups.

The choice is a function of the counts and the budget alone, so all attempts choose the same
documents and reuse each other's finished shards. `data/select/hash_ranges.py` and
`data/select/row_groups.py` explain why samples are nested and splits disjoint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np

from data.arrays import load_array
from data.read.unit import Fields, Unit, small_together
from data.read.work_units import list_files, list_units
from data.select.document_hash import document_hash
from data.select.hash_histogram import HashHistogram, merge
from data.select.hash_ranges import (
    BoundaryDocuments,
    at_the_ends,
    boundary_bins,
    thresholds,
    too_much,
)
from data.select.row_groups import Group, RowGroupOrder, join_units
from data.select.token_budget import ALL_THAT_IS_LEFT, Budget
from data.select.token_ratio import Cluster, TokenRatio, estimate
from data.select.write_sample import below
from pipeline import InputError, StepContext
from pipeline.store import storage
from pipeline.store.parallel import concurrently, in_order
from pipeline.store.shards import Shard
from steps.artifacts import Documents, Tokenizer
from steps.documents.items import stored_units
from steps.documents.sample_shards import (
    Filter,
    ProbeItem,
    SampleItem,
    block_shard,
    edge_shard,
    probe_shard,
    survey_shard,
)

_SURVEY_UNITS = 16  # units of one file that one task counts
_PROBE_GROUPS = 16  # row groups that one round of probing tokenises
_PROBE_FILES = 4  # files to probe with unit="row_group", which should fetch little but its sample
_PROBE_PARTS = 8  # probe tasks over these files together
_PROBE_SHARE = 16  # a probe tokenises at most 1/16 of the text, within the next two limits:
_PROBE_MOST, _PROBE_LEAST = 8 << 20, 32 << 10  # most bytes in all; least limit of one row group
_BLOCKS_AT_ONCE = 64  # most blocks of row groups that are counted ahead of their use


@dataclass(frozen=True)
class Request:
    """The arguments of `sample` and its attempt."""

    run: StepContext
    source: Documents | str
    tokenizer: Tokenizer | None
    budget: Budget
    filter: Filter
    fields: Fields

    @property
    def where(self) -> str:
        """What messages call the source."""
        return self.source if isinstance(self.source, str) else self.source.path


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The chosen documents, and statistics of the choice."""

    items: list[SampleItem]
    rate: TokenRatio | None  # None without a tokenizer
    # For unit="document": counts of the source, and documents with the last id of each split.
    counted: HashHistogram | None = None
    at_the_ends: Mapping[str, int] = field(default_factory=dict)
    # For unit="row_group": documents by reason of row groups in which none can be chosen, files of
    # the source, which need not all be opened, and compressed bytes of the chosen row groups.
    skipped: Mapping[str, int] = field(default_factory=dict)
    files: int | None = None
    fetched: int | None = None


def choose_documents(request: Request) -> Chosen:
    """Count the whole source and choose ranges of the document hash for every split.

    Counting reads ids and token counts and no text.
    """
    run, filter = request.run, request.filter
    if isinstance(request.source, str):
        units = list_units(
            request.source,
            request.fields,
            progress=lambda done, total: run.progress(done, total, "files listed"),
        )
    else:
        units = stored_units(request.source, request.fields)
    groups = enumerate(_to_count(units))
    items = {f"survey/{index:06d}": (group, filter) for index, group in groups}
    surveyed = run.map(survey_shard, items)
    survey = merge(_surveys(run, surveyed.values()))
    if not survey.documents:
        least = filter.min_score
        why = "expected documents, found none in any row that was not skipped; name other files"
        if survey.seen and least is not None:
            why = f"none of {survey.seen:,} documents scores {least} or more; lower min_score"
        raise InputError(f"{request.where}: {why}")
    rate = _probe_units(request, units)
    bins = boundary_bins(survey, request.budget, rate)
    looked = {
        name.replace("survey", "edge"): (storage.join(run.root, shard.root), bins)
        for name, shard in surveyed.items()
        if len(bins)
    }
    edge = _edge(run, bins, run.map(edge_shard, looked))
    try:
        ranges = thresholds(survey, request.budget, rate, edge)
    except InputError as error:
        raise InputError(f"{request.where}: {error}") from None
    return Chosen(
        items=[SampleItem(group, ranges, filter) for group in small_together(units)],
        rate=rate,
        counted=survey,
        at_the_ends=at_the_ends(ranges, edge),
    )


def _to_count(units: list[Unit]) -> Iterator[tuple[Unit, ...]]:
    """Neighbouring units for one task: several of one file if their text is not read, or several
    small files."""
    found: list[Unit] = []
    for group in small_together(units):
        limit = _SURVEY_UNITS if group[0].counted else 1
        alone = len(group) == 1 and len(found) < limit
        if found and not (alone and found[0].file == group[0].file):
            yield tuple(found)
            found = []
        found += group
    if found:
        yield tuple(found)


def _surveys(run: StepContext, shards: Iterable[Shard]) -> Iterator[HashHistogram]:
    """The counts that each `survey_shard` wrote; a few at a time are in memory."""

    def load(shard: Shard) -> HashHistogram:
        tokens, documents = load_array(f"{storage.join(run.root, shard.root)}/bins.npy")
        return HashHistogram(
            seen=shard.result["seen"],
            text_bytes=shard.result["bytes"],
            tokens_by_bin=tokens,
            documents_by_bin=documents,
        )

    return in_order(load, shards, run.root)


def _edge(run: StepContext, bins: np.ndarray, written: Mapping[str, Shard]) -> BoundaryDocuments:
    """The documents that all `edge_shard`s wrote."""
    shards = [shard for shard in written.values() if shard.result["documents"]]
    urls = [storage.join(run.root, shard.root, "edge.npy") for shard in shards]
    parts = concurrently(load_array, urls, run.root)
    hashes, counts = np.concatenate([np.empty((2, 0), np.uint64), *parts], axis=1)
    return BoundaryDocuments.of(bins, hashes, counts.astype(np.int64))


def _probed(request: Request, items: Mapping[str, ProbeItem]) -> list[Cluster]:
    shards = request.run.map(probe_shard, items).values()
    return [msgspec.convert(shard.result, Cluster) for shard in shards]


def _probe_units(request: Request, units: list[Unit]) -> TokenRatio | None:
    """The tokenizer's rate on documents of some row groups.

    The seed chooses the row groups; the choice does not depend on the budget.
    """
    if request.tokenizer is None:
        return None
    groups = [(unit, index) for unit in units for index in unit.row_groups]
    names = [f"{u.file.rpartition('/')[2]}\0{index + u.begin}" for u, index in groups]
    places = document_hash(names, request.filter.seed)
    order = sorted(range(len(groups)), key=lambda index: (places[index], index))
    tokenizer = request.tokenizer.file, request.tokenizer.digest
    size = sum(unit.text_bytes for unit in units)
    most = max(_PROBE_LEAST, min(_PROBE_MOST, size // _PROBE_SHARE) // _PROBE_GROUPS)
    found: list[Cluster] = []
    # With a high `min_score` a whole round of row groups may have no document: probe the next.
    for start in range(0, len(order), _PROBE_GROUPS):
        part = order[start : start + _PROBE_GROUPS]
        items = {
            f"probe/{start + n:06d}": ProbeItem(groups[i], request.filter, tokenizer, most)
            for n, i in enumerate(part)
        }
        found += _probed(request, items)
        if any(cluster.documents for cluster in found):
            break
    return estimate(found)


def choose_row_groups(request: Request) -> Chosen:
    """Take row groups, in the order of the seed, until every split has its budget.

    Held-out splits take them from the end of the order and training from its start, so that a
    larger training budget leaves the held-out splits unchanged.
    """
    if not isinstance(request.source, str):
        raise InputError(
            f'{request.where}: expected a source with unit="row_group", found documents of a step; '
            'use unit="document"'
        )
    files, seed = [url for url, _ in list_files(request.source)], request.filter.seed
    train, *held_out = request.budget.names

    def order(backwards: bool) -> RowGroupOrder:
        return RowGroupOrder(files, seed, backwards=backwards, fields=request.fields)

    rate = _probe_walk(request, order(backwards=False))
    backward = _walked(request, order(backwards=True), "walk-back")
    taken: dict[str, list[Group]] = {}
    for name in held_out:
        taken[name] = _take(request, backward, name, rate, taken)
    others = {group.key for groups in taken.values() for group in groups}
    forward = _walked(request, order(backwards=False), "walk")
    left = (group for group in forward if group.key not in others)
    taken[train] = _take(request, left, train, rate, taken)
    items, fetched, skipped = [], 0, Counter[str]()
    for name in request.budget.names:
        used = [group for group in taken[name] if group.documents]
        fetched += sum(group.compressed_bytes for group in used)
        for group in taken[name]:
            if not group.documents:
                low = group.unit.rows - sum(group.skipped.values())
                skipped.update({**group.skipped, below(request.filter.min_score or 0.0): low})
        units = join_units(group.unit for group in used)
        items += [SampleItem((unit,), name, request.filter) for unit in units]
    return Chosen(items=items, rate=rate, skipped=+skipped, files=len(files), fetched=fetched)


def _probe_walk(request: Request, walk: RowGroupOrder) -> TokenRatio | None:
    """The tokenizer's rate on the first row groups of the first files in the order."""
    if request.tokenizer is None:
        return None
    blocks = walk.next_blocks(_PROBE_FILES)
    most = _PROBE_MOST // _PROBE_PARTS
    tokenizer = request.tokenizer.file, request.tokenizer.digest
    parts = -(-_PROBE_PARTS // len(blocks))
    items = {
        f"probe/{index:06d}-{part}": ProbeItem(
            block, request.filter, tokenizer, most, part=part, parts=parts
        )
        for index, block in enumerate(blocks)
        for part in range(parts)
    }
    found = _probed(request, items)
    if not any(cluster.documents for cluster in found):
        raise InputError(
            f"{request.where}: min_score={request.filter.min_score}: no document of the first row "
            f"groups of {len(blocks)} files scores as much, so no tokens can be predicted; "
            'lower min_score, or use unit="document"'
        )
    return estimate(found)


def _walked(request: Request, walk: RowGroupOrder, prefix: str) -> Iterator[Group]:
    """The row groups of an order; blocks are counted ahead of their use, ever more at a time."""
    at_once, number = 1, 0
    while blocks := walk.next_blocks(at_once):
        names = [f"{prefix}/{number + index:06d}" for index in range(len(blocks))]
        items = {n: (block, request.filter) for n, block in zip(names, blocks, strict=True)}
        counted = request.run.map(block_shard, items)
        for block, name in zip(blocks, names, strict=True):
            walk.set_row_group_count(block, counted[name].result["row_groups"])
            yield from msgspec.convert(counted[name].result["groups"], list[Group])
        number += len(blocks)
        at_once = min(2 * at_once, _BLOCKS_AT_ONCE)


def _take(
    request: Request,
    groups: Iterator[Group],
    name: str,
    rate: TokenRatio | None,
    others: Mapping[str, list[Group]],
) -> list[Group]:
    """The fewest next row groups whose predicted tokens reach a split's budget."""
    known = rate or TokenRatio()

    def predicted(group: Group) -> float:
        return float(known.predict(group.tokens, group.documents))

    asked, held = request.budget.asked(name), 0.0
    found: list[Group] = []
    for group in groups:
        found.append(group)
        held += predicted(group)
        if asked != ALL_THAT_IS_LEFT and held >= asked:
            return found
    if asked == ALL_THAT_IS_LEFT and any(group.documents for group in found):
        return found
    total = held + sum(predicted(group) for part in others.values() for group in part)
    raise InputError(
        f"{request.where}: {too_much(name, request.budget, max(1, asked), held, total)}"
    )
