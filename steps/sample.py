"""Sample documents to a token budget: a survey of the source, a threshold, a pass that writes.

The survey reads ids and token counts only and is kept shard by shard; the threshold follows from
it and is exact to one of 65,536 hash bins. See `data/sampling.py` for what makes samples nested
and splits disjoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline import InputError, Result, StepRun, step, storage
from pipeline.manifest import Shard
from steps.artifacts import Documents, Tokenizer

_PROBE_UNITS = 8
_PROBE_DOCUMENTS = 200


@step(output=Documents, version=1)
def sample(
    run: StepRun,
    source: str,
    tokenizer: Tokenizer | None = None,
    *,
    tokens: int,
    validation_tokens: int = 0,
    test_tokens: int = 0,
    seed: int = 0,
) -> Result:
    """Documents of `source` by hash of (seed, id), up to a budget of tokens per split.

    Args:
        run: the attempt.
        source: Parquet glob or embedded text (see `data/source.py`).
        tokenizer: count the budget in this tokenizer's tokens (measured on a probe) rather than
            in the source's own `token_count`.
        tokens: training tokens asked for; -1 for all that validation and test leave.
        validation_tokens: held-out tokens asked for; they do not move when `tokens` changes.
        test_tokens: the same for a second held-out split.
        seed: another seed is another sample.
    """
    from data.parquet import list_units
    from data.sampling import Budget, merge, thresholds

    units = list_units(source)
    names = [f"{index:05d}" for index in range(len(units))]
    items = {f"survey/{n}": (unit, seed) for n, unit in zip(names, units, strict=True)}
    surveyed = run.map(survey_shard, items)
    survey = merge([_load_survey(run, shard) for shard in surveyed.values()])
    ratio = _tokens_per_count(units, tokenizer) if tokenizer is not None else 1.0
    budget = Budget(train=tokens, validation=validation_tokens, test=test_tokens)
    try:
        ranges = thresholds(survey, budget, ratio)
    except InputError as error:
        raise InputError(f"{source}: {error}") from None
    written = run.map(
        sample_shard,
        {f"sample/{n}": (unit, ranges, seed) for n, unit in zip(names, units, strict=True)},
    )
    return _summary(written, survey, budget, ratio)


def survey_shard(directory: str, item: tuple[Any, int]) -> Mapping[str, Any]:
    """Shard writer: counts of one unit by hash bin."""
    import numpy as np

    from data.sampling import survey

    unit, seed = item
    found = survey(unit, seed)
    with storage.open_write(storage.join(directory, "bins.npy")) as file:
        bins = np.stack([found.tokens_by_bin, found.documents_by_bin])
        np.save(file, bins, allow_pickle=False)
    return {"documents": found.documents, "tokens": found.tokens, "bytes": found.text_bytes}


def sample_shard(directory: str, item: tuple[Any, Any, int]) -> Mapping[str, Any]:
    """Shard writer: one unit's documents, a Parquet file per split."""
    from data.sampling import sample_unit

    unit, ranges, seed = item
    return sample_unit(unit, ranges, seed, directory)


def _load_survey(run: StepRun, shard: Shard) -> Any:
    import numpy as np

    from data.sampling import Survey

    with storage.open_read(storage.join(run.root, shard.root, "bins.npy")) as file:
        tokens_by_bin, documents_by_bin = np.load(file, allow_pickle=False)
    return Survey(
        documents=shard.result["documents"],
        tokens=shard.result["tokens"],
        text_bytes=shard.result["bytes"],
        tokens_by_bin=tokens_by_bin,
        documents_by_bin=documents_by_bin,
    )


def _tokens_per_count(units: list[Any], tokenizer: Tokenizer) -> float:
    """Tokens (EOS included) per `token_count`, on the first documents of evenly spaced units."""
    from data.parquet import read_unit

    text_tokenizer = tokenizer.load()
    stride = max(1, len(units) // _PROBE_UNITS)
    got = counted = 0
    for unit in units[::stride]:
        for batch in read_unit(unit, ("text", "token_count")):
            head = batch.slice(0, _PROBE_DOCUMENTS)
            ids, _ = text_tokenizer.encode_batch(head.column("text").to_pylist())
            got += len(ids) + len(head)
            counted += sum(head.column("token_count").to_pylist())
            break
    return got / counted


def _summary(written: Mapping[str, Shard], survey: Any, budget: Any, ratio: float) -> Result:
    asked = {"train": budget.train, "validation": budget.validation, "test": budget.test}
    splits: dict[str, dict[str, float]] = {}
    for split, wanted in asked.items():
        parts = [s.result[split] for s in written.values() if split in s.result]
        counted = sum(part["tokens"] for part in parts)
        splits[split] = {
            "tokens_asked": wanted,
            "tokens_predicted": round(counted * ratio),
            "documents": sum(part["documents"] for part in parts),
            "bytes": sum(part["bytes"] for part in parts),
        }
    dropped: dict[str, int] = {}
    for shard in written.values():
        for reason, count in shard.result["dropped"].items():
            dropped[reason] = dropped.get(reason, 0) + count
    return {
        "source_documents": survey.documents,
        "source_tokens_by_count": survey.tokens,
        "tokens_per_count": ratio,
        "splits": splits,
        "dropped": dropped,
    }
