"""Sample documents to a token budget: count the source, choose, write, drop duplicates.

Counting reads ids and token counts and no text. The choice is a function of the counts and the
budget alone, so all attempts choose the same documents and reuse each other's finished shards.
`data/select/hash_ranges.py` and `data/select/row_groups.py` explain why samples are nested and
splits disjoint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from data.read.unit import Fields
from data.select.token_budget import ALL_THAT_IS_LEFT, Budget
from pipeline import InputError, Result, StepContext, step
from pipeline.graph.step import Node
from pipeline.store import storage
from pipeline.store.shards import Shard
from steps.artifacts import Documents, Tokenizer
from steps.documents.duplicates import drop_duplicates as without_duplicates
from steps.documents.duplicates import forget_comparison
from steps.documents.first_documents import first_documents
from steps.documents.items import DocumentSource, stored_units
from steps.documents.sample_shards import (
    Filter,
    ProbeItem,
    SampleItem,
    block_shard,
    clusters,
    edge_shard,
    load_edge,
    load_surveys,
    probe_shard,
    sample_shard,
    survey_shard,
)
from steps.documents.sample_summary import Chosen, summary
from steps.gang import HUB

if TYPE_CHECKING:
    from data.read.work_units import Unit
    from data.select.row_groups import Group, RowGroupOrder
    from data.select.token_ratio import TokenRatio
_SURVEY_UNITS = 16  # units of one file that one task counts
_PROBE_GROUPS = 16  # row groups that one round of probing tokenises
_PROBE_FILES = 4  # files to probe with unit="row_group", which should fetch little but its sample
_PROBE_PARTS = 8  # probe tasks over these files together
_PROBE_SHARE = 16  # a probe tokenises at most 1/16 of the text, within the next two limits:
_PROBE_MOST, _PROBE_LEAST = 8 << 20, 32 << 10  # most bytes in all; least limit of one row group
_BLOCKS_AT_ONCE = 64  # most blocks of row groups that are counted ahead of their use


@dataclass(frozen=True)
class Request:
    """The step's arguments and its attempt."""

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


def _check(arguments: Mapping[str, Any]) -> None:
    if (unit := arguments["unit"]) not in ("document", "row_group"):
        raise InputError(f"unit={unit!r}: expected 'document' or 'row_group'")
    Budget(train=arguments["tokens"], splits=arguments["splits"])


@step(
    output=Documents,
    version=4,
    cpus=0,
    check=_check,
    facts=first_documents,
    environment=HUB,
)
def sample(
    run: StepContext,
    source: DocumentSource,
    tokenizer: Tokenizer | None = None,
    *,
    tokens: int,
    splits: tuple[tuple[str, int], ...] = (),
    seed: int = 0,
    min_score: float | None = None,
    unit: Literal["document", "row_group"] = "document",
    drop_duplicates: bool = False,
    text: str = "text",
    id: str | None = None,
    score: str = "score",
    skip_nulls: bool = False,
    skip_invalid: bool = False,
    columns: tuple[str, ...] = (),
) -> Result:
    """Documents of `source` up to a budget of tokens per split.

    Args:
        source: files, folders, a pattern (see `data/source.py`); or documents without held-out
            splits, which have all of their columns.
        tokenizer: counts the budget in its own tokens, EOS included (predicted from a probe);
            without it the budget is in the source's own `token_count`.
        tokens: budget of training tokens; -1 for everything that the other splits leave.
        splits: (name, tokens) of the held-out splits. A split keeps its documents when `tokens`
            changes or when other splits are added after it.
        seed: another seed gives another sample.
        min_score: drops documents with a lower `score` before counting.
        unit: "document" samples by hash of (seed, id) and reads the ids and counts of the whole
            source; "row_group" samples whole row groups and reads little more than the sample.
        drop_duplicates: keep one of the documents with equal text. The budget counts documents
            before duplicates are dropped.
        text: column or key of the text.
        id: column or key of the id; None takes "id" if it exists and else derives an id from the
            text.
        score: column or key of the score.
        skip_nulls: skip and count rows with a null instead of refusing them.
        skip_invalid: likewise rows that are no document: a line that is not JSON, a text that is
            not UTF-8, an impossible count. A damaged file is refused all the same.
        columns: other columns of the source to keep.

    Raises:
        InputError: the source cannot be read, has fewer tokens than the budget, or a split would
            have no document.
    """
    filter = Filter(seed, min_score, drop_duplicates)
    budget = Budget(train=tokens, splits=splits)
    fields = Fields(text, id, score, skip_nulls, skip_invalid, columns)
    request = Request(run, source, tokenizer, budget, filter, fields)
    choice = _choose_documents(request) if unit == "document" else choose_row_groups(request)
    items = {f"sample/{index:06d}": item for index, item in enumerate(choice.items)}
    written = run.map(sample_shard, items)
    unique, repeated = (
        without_duplicates(run, budget.names, written, by_position=unit == "row_group")
        if drop_duplicates
        else ({}, None)
    )
    result = summary(run, budget, choice, written, unique, repeated)
    forget_comparison(run)
    return result


def _choose_documents(request: Request) -> Chosen:
    """Count the whole source and choose ranges of the document hash for every split."""
    from data.read.unit import small_together
    from data.read.work_units import list_units
    from data.select.hash_histogram import merge
    from data.select.hash_ranges import at_the_ends, boundary_bins, thresholds

    if isinstance(request.source, str):
        units = list_units(
            request.source,
            request.fields,
            progress=lambda done, total: request.run.progress(done, total, "files listed"),
        )
    else:
        units = stored_units(request.source, request.fields.score)
    items = {
        f"survey/{index:06d}": (group, request.filter)
        for index, group in enumerate(_to_count(units))
    }
    surveyed = request.run.map(survey_shard, items)
    survey = merge(load_surveys(request.run, surveyed.values()))
    if not survey.documents:
        least = request.filter.min_score
        why = "expected documents, found none in any row that was not skipped; name other files"
        if survey.seen and least is not None:
            why = f"none of {survey.seen:,} documents scores {least} or more; lower min_score"
        raise InputError(f"{request.where}: {why}")
    rate = _probe_units(request, units)
    bins = boundary_bins(survey, request.budget, rate)
    looked = {
        name.replace("survey", "edge"): (storage.join(request.run.root, shard.root), bins)
        for name, shard in surveyed.items()
        if len(bins)
    }
    edge = load_edge(request.run, bins, request.run.map(edge_shard, looked).values())
    try:
        ranges = thresholds(survey, request.budget, rate, edge)
    except InputError as error:
        raise InputError(f"{request.where}: {error}") from None
    return Chosen(
        items=[SampleItem(group, ranges, request.filter) for group in small_together(units)],
        rate=rate,
        counted=survey,
        at_the_ends=at_the_ends(ranges, edge),
    )


def _to_count(units: list[Unit]) -> Iterator[tuple[Unit, ...]]:
    """Neighbouring units for one task: several of one file if their text is not read, or several
    small files."""
    from data.read.unit import small_together

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


def _probe_units(request: Request, units: list[Unit]) -> TokenRatio | None:
    """The tokenizer's rate on documents of some row groups.

    The seed chooses the row groups; the choice does not depend on the budget.
    """
    from data.select.document_hash import document_hash
    from data.select.token_ratio import estimate

    if request.tokenizer is None:
        return None
    groups = [(unit, index) for unit in units for index in unit.row_groups]
    names = [f"{u.file.rpartition('/')[2]}\0{index + u.begin}" for u, index in groups]
    places = document_hash(names, request.filter.seed)
    order = sorted(range(len(groups)), key=lambda index: (places[index], index))
    tokenizer = request.tokenizer.file, request.tokenizer.digest
    size = sum(unit.text_bytes for unit in units)
    most = max(_PROBE_LEAST, min(_PROBE_MOST, size // _PROBE_SHARE) // _PROBE_GROUPS)
    found: dict[str, Shard] = {}
    # With a high `min_score` a whole round of row groups may have no document: probe the next.
    for start in range(0, len(order), _PROBE_GROUPS):
        part = order[start : start + _PROBE_GROUPS]
        items = {
            f"probe/{start + n:06d}": ProbeItem(groups[i], request.filter, tokenizer, most)
            for n, i in enumerate(part)
        }
        found |= request.run.map(probe_shard, items)
        if any(cluster.documents for cluster in clusters(found)):
            break
    return estimate(clusters(found))


def choose_row_groups(request: Request) -> Chosen:
    """Take row groups, in the order of the seed, until every split has its budget.

    Held-out splits take them from the end of the order and training from its start, so that a
    larger training budget leaves the held-out splits unchanged.
    """
    from data.read.work_units import list_files
    from data.select.row_groups import RowGroupOrder, join_units
    from data.select.write_sample import below

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
    from data.select.token_ratio import estimate

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
    found = clusters(request.run.map(probe_shard, items))
    if not any(cluster.documents for cluster in found):
        raise InputError(
            f"{request.where}: min_score={request.filter.min_score}: no document of the first row "
            f"groups of {len(blocks)} files scores as much, so no tokens can be predicted; "
            'lower min_score, or use unit="document"'
        )
    return estimate(found)


def _walked(request: Request, walk: RowGroupOrder, prefix: str) -> Iterator[Group]:
    """The row groups of an order; blocks are counted ahead of their use, ever more at a time."""
    import msgspec

    from data.select.row_groups import Group

    at_once, number = 1, 0
    while blocks := walk.next_blocks(at_once):
        items = {
            f"{prefix}/{number + index:06d}": (block, request.filter)
            for index, block in enumerate(blocks)
        }
        counted = request.run.map(block_shard, items)
        for block, name in zip(blocks, items, strict=True):
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
    from data.select.hash_ranges import too_much
    from data.select.token_ratio import TokenRatio

    known = rate or TokenRatio()
    asked, held = request.budget.asked(name), 0.0
    found: list[Group] = []
    for group in groups:
        found.append(group)
        held += float(known.predict(group.tokens, group.documents))
        if asked != ALL_THAT_IS_LEFT and held >= asked:
            return found
    if asked == ALL_THAT_IS_LEFT and any(group.documents for group in found):
        return found
    total = held + sum(
        float(known.predict(group.tokens, group.documents))
        for part in others.values()
        for group in part
    )
    raise InputError(
        f"{request.where}: {too_much(name, request.budget, max(1, asked), held, total)}"
    )


def sampled(node: Node) -> Any:
    """The call of a step over all documents of a source that it was given in their place."""
    if (source := node.config.get("documents")) is None:
        return node
    arguments = {**node.config, **node.runtime, **node.inputs}
    return node.step(**{**arguments, "documents": sample(source, tokens=-1)})
