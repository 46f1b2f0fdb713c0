"""Deduplicate: of documents that are equal, or nearly, keep one.

Rounds of shards, each of bounded memory: `sign` computes the keys of each item's documents (a hash
of each band of a MinHash signature, or one of the value compared), `compare` finds the equal keys
of one share of some bands, `merge` joins what was found where that is much, `resolve` finds the
clusters and their keepers, and `documents` writes the documents again without the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from data.prepare.comparison import Comparison, NearDuplicates
from data.read.unit import Fields
from pipeline import InputError, Result, StepContext, step
from pipeline.store import storage
from pipeline.store.shards import Shard
from steps.artifacts import TRAIN, Documents
from steps.documents.facts import source_license
from steps.documents.items import DocumentSource, document_items, forget, in_groups
from steps.documents.result import documents_result
from steps.gang import HUB

if TYPE_CHECKING:
    from data.prepare.items import DocumentItem

AT_ONCE = 1 << 22
"""Keys, or edges, of one task."""


def _check(arguments: Mapping[str, Any]) -> None:
    if arguments["near"] and arguments["by"] is not None:
        raise InputError(
            f"by={arguments['by']!r}: expected near=False with it, since values of a column are "
            "compared for equality; near-duplicates are those of the text"
        )


@step(output=Documents, version=2, cpus=0, check=_check, facts=source_license, environment=HUB)
def deduplicate(
    run: StepContext,
    documents: DocumentSource,
    *,
    near: bool | NearDuplicates = True,
    by: str | None = None,
    across_splits: bool = True,
    fields: Fields = Fields(),
) -> Result:
    """One document of each cluster of duplicates.

    A cluster is all documents that are connected by pairs of duplicates. The one in the held-out
    split named first is kept, or one in train if none is held out; within a split the one with the
    smallest hash of its id. So the output does not depend on the order of the files. Beside the
    documents of each shard, `dropped.parquet` has id and split of the others and their keeper's id.

    Args:
        documents: documents, or a source.
        near: find near-duplicates of the text; False drops documents that are equal.
        by: with `near=False`, the column whose values are compared, such as "url"; None is the
            text. A document without a value is kept.
        across_splits: drop a training document that has a duplicate in a held-out split, and a
            held-out one with a duplicate in an earlier one. False compares each split for itself.
        fields: names of a source's columns, and which others to keep.

    Raises:
        InputError: there is no column `by`, its values cannot be compared, or a split loses all of
            its documents.
    """
    from data.prepare.duplicates import resolve_shard, sign_shard, unique_shard

    method = NearDuplicates() if near is True else near or None
    order = documents.splits if isinstance(documents, Documents) else (TRAIN,)
    held_out = [name for name in order if name != TRAIN]
    ranks = {name: rank for rank, name in enumerate((*held_out, TRAIN))}
    if "dropped" in ranks:
        raise InputError("expected splits of other names than 'dropped', which names a file here")
    comparison = Comparison(method, by or "text", ranks, across_splits)
    items = _items(documents, comparison.by, fields)
    work = {name.replace("documents/", "sign/"): (item, comparison) for name, item in items.items()}
    signed = run.map(sign_shard, work)
    places = _places(run, signed)
    count = sum(shard.result["documents"] for shard in signed.values())
    compared = _compare(run, places, count, comparison)
    found = run.map(resolve_shard, {"resolve/all": (compared, places)})
    resolved = found["resolve/all"].result
    lost = dict.fromkeys(resolved["items"], *_places(run, found))
    each = enumerate(items.items())
    unique = {name: (item, n, lost.get(n), comparison) for n, (name, item) in each}
    written = run.map(unique_shard, unique)
    counts = {name: resolved[name] for name in ("clusters", "largest_cluster")}
    result = documents_result(run, written, documents, **counts)
    forget(run, "sign/", "compare/", "merge/", "resolve/")
    return result


def _items(documents: Documents | str, by: str, fields: Fields) -> dict[str, DocumentItem]:
    from data.select.split_writer import COLUMNS

    if by not in (*COLUMNS, *fields.columns):
        fields = replace(fields, columns=(*fields.columns, by))
    items = document_items(documents, fields)
    for item in items.values():
        if by not in item.columns:
            raise InputError(f"by={by!r}: expected one of the columns {', '.join(item.columns)}")
    return items


def _compare(
    run: StepContext, places: list[str], documents: int, comparison: Comparison
) -> list[str]:
    """Directories with all edges, few enough for one task, or in one file."""
    from data.prepare.duplicates import SHARES, Share, compare_shard, merge_shard

    shares = 1
    while shares < min(SHARES, documents / AT_ONCE):
        shares *= 2
    step = max(1, AT_ONCE // max(1, documents))  # bands of one task
    work = {
        f"compare/{share:03d}-{band:04d}": (
            Share(places, (band, min(band + step, comparison.bands)), share, shares),
            comparison,
        )
        for share in range(shares)
        for band in range(0, comparison.bands, step)
    }
    shards, level = run.map(compare_shard, work), 0
    while len(shards) > 1 and sum(shard.result["edges"] for shard in shards.values()) > AT_ONCE:
        groups = in_groups(shards.items(), lambda each: each[1].result["edges"], AT_ONCE, least=2)
        merged = {
            f"merge/{level:02d}-{number:06d}": _places(run, dict(group))
            for number, group in enumerate(groups)
        }
        shards, level = run.map(merge_shard, merged), level + 1
    return _places(run, shards)


def _places(run: StepContext, shards: Mapping[str, Shard]) -> list[str]:
    return [storage.join(run.root, shard.root) for shard in shards.values()]
