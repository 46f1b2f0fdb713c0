"""Sample documents to a token budget: count the source, choose, write, drop duplicates.

Counting reads ids and token counts and no text; what is chosen follows from the counts and the
budget alone, so every attempt chooses the same, and what is finished is kept shard by shard. See
`data/select/hash_ranges.py` and `data/select/row_groups.py` for what makes samples nested and
splits disjoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from data.read.listing import absolute, list_source
from data.read.unit import Fields
from data.select.token_budget import ALL_THAT_IS_LEFT, Budget
from pipeline import External, InputError, Result, Runtime, StepContext, step
from pipeline.store import storage
from pipeline.store.manifest import Shard
from steps.artifacts import Documents, Tokenizer
from steps.sampling.shards import (
    BlockItem,
    EdgeItem,
    Filter,
    ProbeItem,
    SampleItem,
    SurveyItem,
    UniqueItem,
    block_shard,
    clusters,
    edge_shard,
    load_edge,
    load_survey,
    probe_shard,
    sample_shard,
    survey_shard,
    unique_shard,
)
from steps.sampling.summary import Chosen, summary

if TYPE_CHECKING:
    from data.read.work_units import Unit
    from data.select.row_groups import Group, RowGroupOrder
    from data.select.token_ratio import TokenRatio
_SURVEY_UNITS = 16  # of one file, counted by one task
_PROBE_GROUPS = 16
_PROBE_FILES = 4  # of a walk, which fetches little more than it samples
_PROBE_PARTS = 8  # of these files together
_PROBE_SHARE = 16  # of the text is tokenised at most, but for what a few documents have,
_PROBE_MOST, _PROBE_LEAST = 8 << 20, 32 << 10  # in all; in one place
_BLOCKS_AT_ONCE = 64


@dataclass(frozen=True)
class _Ask:
    """What the step was asked for, and its attempt."""

    run: StepContext
    source: str
    tokenizer: Tokenizer | None
    budget: Budget
    chosen: Filter
    verify: bool
    fields: Fields


def _check(arguments: Mapping[str, Any]) -> None:
    if (unit := arguments["unit"]) not in ("document", "row_group"):
        raise InputError(f"unit={unit!r}: expected 'document' or 'row_group'")
    Budget(train=arguments["tokens"], held_out=arguments["splits"])


@step(output=Documents, version=4, cpus=0, check=_check)
def sample(
    run: StepContext,
    source: Annotated[str, External(list_source, absolute)],
    tokenizer: Tokenizer | None = None,
    *,
    tokens: int,
    splits: tuple[tuple[str, int], ...] = (),
    seed: int = 0,
    min_score: float | None = None,
    unit: Literal["document", "row_group"] = "document",
    drop_duplicates: bool = False,
    verify_files: Annotated[bool, Runtime] = False,
    text: str = "text",
    id: str | None = None,
    score: str = "score",
    skip_nulls: bool = False,
) -> Result:
    """Documents of `source` up to a budget of tokens per split.

    Args:
        run: the attempt.
        source: files, folders or embedded text (see `data/source.py`).
        tokenizer: count the budget in this tokenizer's tokens, EOS included (predicted from a
            probe), rather than in the source's own `token_count`.
        tokens: training tokens asked for; -1 for all that the other splits leave.
        splits: (name, tokens) of the held-out splits. They do not move when `tokens` changes, nor
            when another is named after them.
        seed: another seed is another sample.
        min_score: drop documents whose `score` is less, before anything is counted.
        unit: sample documents by hash of (seed, id), which reads ids and counts of the whole
            source; or whole row groups, which reads little more than the sample.
        drop_duplicates: of documents with equal text keep one. Budgets are met before.
        verify_files: check each file that is read against its published SHA-256 first, which reads
            all of it.
        text: the column or key of the text.
        id: the column or key of the id; None for "id" where there is one, and otherwise an id made
            of the text.
        score: the column or key of the score.
        skip_nulls: leave out rows with a null, and count them, rather than refuse them.

    Raises:
        InputError: the source cannot be read, or holds less than was asked.
    """
    chosen = Filter(seed, min_score, drop_duplicates)
    budget = Budget(train=tokens, held_out=splits)
    fields = Fields(text, id, score, skip_nulls)
    ask = _Ask(run, source, tokenizer, budget, chosen, verify_files, fields)
    choice = _choose_documents(ask) if unit == "document" else _choose_row_groups(ask)
    items = {f"sample/{index:06d}": item for index, item in enumerate(choice.items)}
    written = run.map(sample_shard, items)
    unique, repeated = (
        _drop_duplicates(ask, written, by_position=unit == "row_group")
        if drop_duplicates
        else ({}, None)
    )
    return summary(run, budget, choice, written, unique, repeated)


def _choose_documents(ask: _Ask) -> Chosen:
    """Count the whole source, and let each of its units be sampled by ranges of the hash."""
    from data.read.small_files import small_together
    from data.read.work_units import list_units
    from data.select.hash_histogram import merge
    from data.select.hash_ranges import boundary_bins, thresholds

    units = list_units(
        ask.source,
        ask.fields,
        progress=lambda done, total: ask.run.progress(done, total, "files looked at"),
    )
    opened: set[str] = set()
    items: dict[str, SurveyItem] = {}
    for index, group in enumerate(_to_count(units)):
        new = tuple(dict.fromkeys(u.file for u in group if u.file not in opened))
        opened.update(new)
        items[f"survey/{index:06d}"] = SurveyItem(group, ask.chosen, new if ask.verify else ())
    surveyed = ask.run.map(survey_shard, items)
    survey = merge(load_survey(ask.run, shard) for shard in surveyed.values())
    if not survey.documents:
        raise InputError(
            f"{ask.source}: none of {survey.seen:,} documents scores {ask.chosen.min_score} or "
            "more; ask for a lower min_score"
        )
    rate = _probe_units(ask, units)
    bins = boundary_bins(survey, ask.budget, rate)
    looked = {
        name.replace("survey", "edge"): EdgeItem(storage.join(ask.run.root, shard.root), bins)
        for name, shard in surveyed.items()
        if len(bins)
    }
    edge = load_edge(ask.run, bins, ask.run.map(edge_shard, looked).values())
    try:
        ranges = thresholds(survey, ask.budget, rate, edge)
    except InputError as error:
        raise InputError(f"{ask.source}: {error}") from None
    return Chosen(
        items=[SampleItem(group, ranges, ask.chosen) for group in small_together(units)],
        rate=rate,
        counted=survey,
    )


def _to_count(units: list[Unit]) -> Iterator[tuple[Unit, ...]]:
    """Neighbouring units for one task: some of one file whose text is not read, small ones."""
    from data.read.small_files import small_together

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


def _probe_units(ask: _Ask, units: list[Unit]) -> TokenRatio | None:
    """The tokenizer's rate on documents of some row groups, chosen by the seed and no budget."""
    from data.select.document_hash import document_hash
    from data.select.token_ratio import estimate

    if ask.tokenizer is None:
        return None
    groups = [(unit, index) for unit in units for index in unit.row_groups]
    names = [f"{u.file.rpartition('/')[2]}\0{index + u.begin}" for u, index in groups]
    places = document_hash(names, ask.chosen.seed)
    order = sorted(range(len(groups)), key=lambda index: (places[index], index))
    tokenizer = ask.tokenizer.file, ask.tokenizer.digest
    size = sum(unit.text_bytes for unit in units)
    most = max(_PROBE_LEAST, min(_PROBE_MOST, size // _PROBE_SHARE) // _PROBE_GROUPS)
    found: dict[str, Shard] = {}
    # A high `min_score` can leave row groups without a document.
    for start in range(0, len(order), _PROBE_GROUPS):
        part = order[start : start + _PROBE_GROUPS]
        items = {
            f"probe/{start + n:06d}": ProbeItem(groups[i], ask.chosen, tokenizer, most)
            for n, i in enumerate(part)
        }
        found |= ask.run.map(probe_shard, items)
        if any(cluster.documents for cluster in clusters(found)):
            break
    return estimate(clusters(found))


def _choose_row_groups(ask: _Ask) -> Chosen:
    """Walk over the source's row groups until every split has what was asked."""
    from data.read.work_units import list_files
    from data.select.row_groups import RowGroupOrder, join_units

    files, seed = [url for url, _ in list_files(ask.source)], ask.chosen.seed
    rate = _probe_walk(ask, RowGroupOrder(files, seed, backwards=False, fields=ask.fields))
    held_out = _walked(
        ask, RowGroupOrder(files, seed, backwards=True, fields=ask.fields), "walk-back"
    )
    taken: dict[str, list[Group]] = {}
    for name in ask.budget.names[1:]:
        taken[name] = _take(ask, held_out, name, rate, taken)
    others = {group.key for groups in taken.values() for group in groups}
    forward = _walked(ask, RowGroupOrder(files, seed, backwards=False, fields=ask.fields), "walk")
    train = (group for group in forward if group.key not in others)
    taken[ask.budget.names[0]] = _take(ask, train, ask.budget.names[0], rate, taken)
    items = []
    passed_over = fetched = 0
    for name in ask.budget.names:
        used = [group for group in taken[name] if group.documents]
        fetched += sum(group.compressed_bytes for group in used)
        passed_over += sum(group.unit.rows for group in taken[name] if not group.documents)
        units = join_units(group.unit for group in used)
        items += [SampleItem((unit,), name, ask.chosen) for unit in units]
    return Chosen(
        items=items, rate=rate, passed_over=passed_over, files=len(files), fetched=fetched
    )


def _probe_walk(ask: _Ask, walk: RowGroupOrder) -> TokenRatio | None:
    """The tokenizer's rate on the first row groups of the walk's first files."""
    from data.select.token_ratio import estimate

    if ask.tokenizer is None:
        return None
    blocks = walk.next_blocks(_PROBE_FILES)
    most = _PROBE_MOST // _PROBE_PARTS
    tokenizer = ask.tokenizer.file, ask.tokenizer.digest
    parts = -(-_PROBE_PARTS // len(blocks))
    items = {
        f"probe/{index:06d}-{part}": ProbeItem(
            block, ask.chosen, tokenizer, most, part=part, parts=parts
        )
        for index, block in enumerate(blocks)
        for part in range(parts)
    }
    found = clusters(ask.run.map(probe_shard, items))
    if not any(cluster.documents for cluster in found):
        raise InputError(
            f"{ask.source}: min_score={ask.chosen.min_score}: no document of the first row groups "
            f"of {len(blocks)} files scores as much, so nothing says how many tokens its "
            'documents have; ask for a lower score, or use unit="document"'
        )
    return estimate(found)


def _walked(ask: _Ask, walk: RowGroupOrder, prefix: str) -> Iterator[Group]:
    """The row groups of a walk, counted a few blocks ahead of who asks for them."""
    from data.select.row_groups import Group

    at_once, number = 1, 0
    while blocks := walk.next_blocks(at_once):
        items = {
            f"{prefix}/{number + index:06d}": BlockItem(
                block, ask.chosen, ask.verify and block.round == 0
            )
            for index, block in enumerate(blocks)
        }
        counted = ask.run.map(block_shard, items)
        for block, name in zip(blocks, items, strict=True):
            walk.set_row_group_count(block, counted[name].result["row_groups"])
            yield from (Group.from_json(tree) for tree in counted[name].result["groups"])
        number += len(blocks)
        at_once = min(2 * at_once, _BLOCKS_AT_ONCE)


def _take(
    ask: _Ask,
    groups: Iterator[Group],
    name: str,
    rate: TokenRatio | None,
    others: Mapping[str, list[Group]],
) -> list[Group]:
    """The fewest next row groups that hold what a split asks for."""
    from data.select.hash_ranges import too_much
    from data.select.token_ratio import TokenRatio

    known = rate or TokenRatio()
    asked, held = ask.budget.asked(name), 0.0
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
    raise InputError(f"{ask.source}: {too_much(name, ask.budget, max(1, asked), held, total)}")


def _drop_duplicates(
    ask: _Ask, written: Mapping[str, Shard], *, by_position: bool
) -> tuple[dict[str, Shard], int]:
    """(shards written again without their duplicates, documents whose id is not the only one)."""
    import numpy as np

    from data.select.duplicates import Part, find_duplicates
    from data.select.write_sample import read_hashes

    train, *held_out = ask.budget.names
    rank = {name: index for index, name in enumerate((*held_out, train))}
    places = [(shard, split) for shard in written.values() for split in shard.result["splits"]]
    parts = [
        Part(
            rank=rank[split],
            documents=shard.result["splits"][split]["documents"],
            load=partial(read_hashes, storage.join(ask.run.root, shard.root), split),
        )
        for shard, split in places
    ]
    found = find_duplicates(parts, by_position=by_position)
    lost: dict[str, dict[str, np.ndarray]] = {}
    for index in found.lost:
        shard = places[index][0]
        none = {split: np.empty(0, np.int64) for split in shard.result["splits"]}
        lost.setdefault(shard.name, none)[places[index][1]] = found.lost[index]
    items = {
        f"unique/{name.rpartition('/')[2]}": UniqueItem(
            storage.join(ask.run.root, written[name].root), rows
        )
        for name, rows in lost.items()
    }
    return ask.run.map(unique_shard, items), found.repeated_ids
