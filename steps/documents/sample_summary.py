"""The result of `steps.sample`: counts that add up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from data.read.work_units import INVALID, NULL
from data.select.document_hash import digest_hex
from data.select.hash_ranges import one_id
from data.select.token_budget import Budget
from data.select.token_ratio import TokenRatio
from pipeline import InputError, Result, StepContext
from pipeline.store.shards import Shard
from steps.documents.sample_choice import Chosen

_FAR_OFF = 0.1  # relative difference from the budget above which the step warns


def summary(
    run: StepContext,
    budget: Budget,
    chosen: Chosen,
    written: Mapping[str, Shard],
    unique: Mapping[str, Shard],
    repeated_ids: int | None,
) -> Result:
    """The step's result, in which `documents_seen` = `documents_kept` + the sum of `dropped`."""
    source: dict[str, Any] = {"files": chosen.files}
    if (whole := chosen.counted) is not None:
        source = {"documents": whole.documents, "tokens_counted": whole.tokens}
        source["text_bytes"] = whole.text_bytes
    probe = None
    if (rate := chosen.rate) is not None:
        probe = {"documents": rate.documents, "clusters": rate.clusters}
        probe |= {"tokens_per_count": rate.per_count, "standard_error": rate.standard_error}
    counted = all(unit.counted for item in chosen.items for unit in item.units)
    numbers = [(name.rpartition("/")[2], shard) for name, shard in written.items()]
    final = [unique.get(f"unique/{number}", shard) for number, shard in numbers]
    splits = {name: _split(name, budget, rate, final) for name in budget.names}
    dropped = Counter[str](chosen.skipped)
    for shard in (*written.values(), *unique.values()):
        dropped.update(shard.result["dropped"])
    if repeated_ids is not None:
        for name, part in splits.items():
            gone = [shard.result["dropped_splits"].get(name, {}) for shard in unique.values()]
            part["duplicates_dropped"] = {
                key: sum(each.get(key, 0) for each in gone) for key in ("documents", "tokens")
            }
    seen = sum(s.result["seen"] for s in written.values()) + sum(chosen.skipped.values())
    for name, part in splits.items():
        if not part["documents"]:
            raise InputError(_empty(name, seen, dropped))
        if line := _far_off(name, part, chosen.at_the_ends.get(name, 0)):
            run.warn(line)
    return {
        "order": list(splits),
        "splits": splits,
        "documents_seen": seen,
        "documents_kept": sum(part["documents"] for part in splits.values()),
        "dropped": dict(dropped),
        "repeated_ids": repeated_ids,
        "source": source,
        "probe": probe,
        "read": {
            "row_groups": sum(s.result["row_groups_read"] for s in written.values()),
            "text_bytes": sum(s.result["text_bytes_read"] for s in written.values()),
            "compressed_bytes": chosen.fetched,
        },
        "content_digest": _sum_hex(part["digest"] for part in splits.values()),
        "headline": [
            *(_line(name, part, counted) for name, part in splits.items()),
            *(f"skipped {dropped[why]:,} {why} rows" for why in (NULL, INVALID) if dropped[why]),
        ],
    }


def _split(
    name: str, budget: Budget, rate: TokenRatio | None, shards: list[Shard]
) -> dict[str, Any]:
    known = rate or TokenRatio()
    parts = [s.result["splits"][name] for s in shards if name in s.result["splits"]]
    documents = sum(part["documents"] for part in parts)
    asked, counted = budget.asked(name), sum(part["tokens"] for part in parts)
    predicted = round(float(known.predict(counted, documents)))
    return {
        "tokens_asked": asked,
        "tokens_counted": counted,
        "tokens_predicted": predicted,
        "predicted_standard_error": known.error(counted, documents),
        "predicted_over_asked": predicted / asked - 1 if asked > 0 else None,
        "documents": documents,
        "bytes": sum(part["bytes"] for part in parts),
        "digest": _sum_hex(part["digest"] for part in parts),
    }


def _sum_hex(digests: Iterable[str]) -> str:
    return digest_hex(sum(int(digest, 16) for digest in digests))


def _empty(name: str, seen: int, dropped: Mapping[str, int]) -> str:
    reasons = ", ".join(f"{count:,} ({reason})" for reason, count in dropped.items() if count)
    return (
        f"{name}: expected documents, found none: of {seen:,} rows, dropped {reasons}; check the "
        "text, or leave the split out"
    )


def _far_off(name: str, part: dict[str, Any], at_the_end: int) -> str:
    """The warning about a split that is far from its budget, or ""; `at_the_end` documents have
    its last id."""
    share = part["predicted_over_asked"]
    if share is None or abs(share) <= _FAR_OFF:
        return ""
    why = (
        one_id(at_the_end) or "its last document or row group is that large"
        if share > 0
        else "empty texts, nulls and duplicates were counted before they were dropped"
    )
    return (
        f"{name}: asked {part['tokens_asked']:,} tokens, holds {part['tokens_predicted']:,} "
        f"({share:+.0%}); {why}"
    )


def _line(name: str, part: dict[str, Any], counted: bool) -> str:
    by = "by the source's count" if counted else "estimated from bytes"
    asked = f"{part['tokens_asked']:,}" if part["tokens_asked"] > 0 else "all there is"
    error = part["predicted_standard_error"]
    share = part["predicted_over_asked"]
    return (
        f"{name}: {part['documents']:,} documents, {part['tokens_counted']:,} tokens {by}; "
        f"asked {asked}, predicted {part['tokens_predicted']:,}"
        + (f" ± {error:,.0f}" if error else "")
        + (f" ({share:+.2%})" if share is not None else "")
        + f"; {part['tokens_counted'] / part['documents']:,.2f} a document"
    )
