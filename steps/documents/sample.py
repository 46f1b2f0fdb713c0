"""Sample documents to a token budget: count the source, choose, write, drop duplicates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from data.read.unit import Fields
from data.select.token_budget import Budget
from pipeline import InputError, Result, StepContext, step
from pipeline.graph.step import Node
from steps.artifacts import Documents, Tokenizer
from steps.declared import data_steps
from steps.documents.facts import first_documents
from steps.documents.items import DocumentSource, forget
from steps.gang import HUB


def _check(arguments: Mapping[str, Any]) -> None:
    if (unit := arguments["unit"]) not in ("document", "row_group"):
        raise InputError(f"unit={unit!r}: expected 'document' or 'row_group'")
    if not isinstance(arguments["source"], str):
        _check_documents(arguments["source"], unit)
    Budget(train=arguments["tokens"], splits=arguments["splits"])


def _check_documents(source: Node, unit: str) -> None:
    """Refuse documents of a step that cannot be sampled, or not by this unit."""
    if unit == "row_group":
        raise InputError(
            f'sample: expected a source with unit="row_group", found documents of {source.label}; '
            'use unit="document"'
        )
    for node in data_steps(source):
        if not node.step.function.__module__.startswith("steps.documents."):
            return  # a user's step may leave splits out
        if held_out := [name for name, tokens in node.config.get("splits", ()) if tokens]:
            raise InputError(
                f"sample: expected documents without held-out splits, found {', '.join(held_out)} "
                f"of {node.label}; sample first, or give what was not sampled"
            )


@step(output=Documents, version=4, cpus=0, check=_check, facts=first_documents, environment=HUB)
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
            have no document, or files of the source have other types of `columns` than others.
    """
    from steps.documents import duplicates
    from steps.documents.result import common_columns
    from steps.documents.sample_choice import Request, choose_documents, choose_row_groups
    from steps.documents.sample_shards import Filter, sample_shard
    from steps.documents.sample_summary import summary

    filter = Filter(seed, min_score, drop_duplicates)
    budget = Budget(train=tokens, splits=splits)
    fields = Fields(text, id, score, skip_nulls, skip_invalid, columns)
    choose = choose_documents if unit == "document" else choose_row_groups
    choice = choose(Request(run, source, tokenizer, budget, filter, fields))
    items = {f"sample/{index:06d}": item for index, item in enumerate(choice.items)}
    written = run.map(sample_shard, items)
    if columns:  # else they are those of every sample; shards of an older version do not say
        found = ((name, s.result.get("measured", {})) for name, s in written.items())
        common_columns((name, about.get("columns", {})) for name, about in found)
    unique, repeated = {}, None
    if drop_duplicates:
        by_position = unit == "row_group"
        unique, repeated = duplicates.drop_duplicates(run, budget.names, written, by_position)
    result = summary(run, budget, choice, written, unique, repeated)
    forget(run, *duplicates.TEMPORARY)
    return result


def sampled(node: Node) -> Any:
    """The call of a step over all documents of a source that it was given in their place."""
    if (source := node.config.get("documents")) is None:
        return node
    arguments = {**node.config, **node.runtime, **node.inputs}
    return node.step(**{**arguments, "documents": sample(source, tokens=-1)})
