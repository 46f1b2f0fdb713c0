"""The result of a step that prepares documents: counts that add up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from pipeline import InputError, Result, StepContext
from pipeline.store import storage
from pipeline.store.shards import Shard
from steps.artifacts import TRAIN, Documents

_LOOKED_AT = 32  # most shards whose examples are read


def documents_result(
    run: StepContext,
    written: Mapping[str, Shard],
    documents: Documents | str,
    **more: Any,
) -> Result:
    """The result of a step whose shards `data.prepare.items.DocumentWriter` wrote.

    `documents_seen` is the sum of `documents_kept` and of `dropped`, the number of documents by
    reason, unless several were made of one; `tokens_seen` likewise of `tokens_kept` and
    `dropped_tokens`, unless texts changed. `examples` has some documents of each reason.

    Args:
        documents: what the step read: the order of its splits is that of the result.
        more: other entries of the result.

    Raises:
        InputError: a split lost all of its documents, or shards have other columns than others.
    """
    from data.select.document_hash import digest_hex

    shards = list(written.values())
    order = list(documents.splits) if isinstance(documents, Documents) else [TRAIN]
    dropped, tokens = Counter[str](), Counter[str]()
    for shard in shards:
        dropped.update(shard.result["dropped"])
        tokens.update(shard.result["dropped_tokens"])
    splits: dict[str, dict[str, Any]] = {}
    for name in order:
        parts = [s.result["splits"][name] for s in shards if name in s.result["splits"]]
        count = {key: sum(part[key] for part in parts) for key in ("documents", "tokens", "bytes")}
        if not count["documents"]:
            reasons = ", ".join(f"{each:,} ({reason})" for reason, each in dropped.items())
            raise InputError(
                f"{run.label}: expected documents to keep in {name!r}, found none: dropped "
                f"{reasons or 'none'}; loosen what drops them, or give other documents"
            )
        splits[name] = {
            "tokens_asked": -1,
            "tokens_counted": count.pop("tokens"),
            **count,
            "digest": digest_hex(sum(int(part["digest"], 16) for part in parts)),
        }
    kept = sum(split["documents"] for split in splits.values())
    seen = sum(shard.result["seen"] for shard in shards)
    kept_tokens = sum(split["tokens_counted"] for split in splits.values())
    return {
        "order": order,
        "splits": splits,
        "documents_seen": seen,
        "documents_kept": kept,
        "tokens_seen": sum(shard.result["tokens_seen"] for shard in shards),
        "tokens_kept": kept_tokens,
        "dropped": dict(dropped.most_common()),
        "dropped_tokens": dict(tokens),
        "examples": _examples(run, shards),
        "columns": common_columns((s.name, s.result["columns"]) for s in shards),
        "headline": [
            f"{kept:,} of {seen:,} documents, {kept_tokens:,} tokens",
            *(f"dropped {count:,}: {reason}" for reason, count in dropped.most_common()),
        ],
        **more,
    }


def common_columns(shards: Iterable[tuple[str, Mapping[str, str]]]) -> dict[str, str]:
    """Type by column, the same in all shards that have documents, of (name, their columns).

    Raises `InputError` if shards have other columns than others.
    """
    found: dict[str, str] = {}
    for name, columns in shards:
        if (found or columns) != (columns or found):
            raise InputError(
                f"documents: expected the columns {found} of the first shard, found "
                f"{dict(columns)} in {name}; give all files of the source the same columns"
            )
        found = found or dict(columns)
    return found


def _examples(run: StepContext, shards: list[Shard]) -> dict[str, list[dict[str, str]]]:
    from data.prepare.items import EXAMPLES, MOST_EXAMPLES

    found: dict[str, list[dict[str, str]]] = {}
    for shard in [s for s in shards if any(f.path == EXAMPLES for f in s.files)][:_LOOKED_AT]:
        url = storage.join(run.root, shard.root, EXAMPLES)
        for reason, shown in storage.read_json(url).items():
            found[reason] = [*found.get(reason, []), *shown][:MOST_EXAMPLES]
    return found
