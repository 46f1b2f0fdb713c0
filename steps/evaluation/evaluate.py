"""Evaluate a trained model on held-out splits, whole or in part."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any

from pipeline import GangProcess, Hardware, Result, Runtime, StepContext, local, step
from pipeline.events import Emit
from steps.artifacts import Checkpoint, Scores, TokenCache, Tokenizer
from steps.declared import check_splits
from steps.evaluation.score_job import NOTHING_ELSE, Also, check_sizes, score_job
from steps.gang import FLAGS, joined

_FIGURES = ("loss", "bits_per_byte", "tokens", "bytes")


def _check(arguments: Mapping[str, Any]) -> None:
    check_sizes(arguments)
    check_splits("evaluate", arguments["tokens"] or arguments["checkpoint"], arguments["splits"])


@step(output=Scores, version=3, cpus=0, check=_check, environment=FLAGS)
def evaluate(
    run: StepContext,
    checkpoint: Checkpoint,
    tokens: TokenCache | None = None,
    tokenizer: Tokenizer | None = None,
    *,
    splits: tuple[str, ...] = (),
    sequences: int | None = None,
    also: Also = NOTHING_ELSE,
    batch_size: Annotated[int | None, Runtime] = None,
    hardware: Annotated[Hardware, Runtime] = local(),
) -> Result:
    """Loss (nats per token) and bits per byte of the final checkpoint on every held-out split.

    Args:
        checkpoint: a trained model.
        tokens: token cache with the held-out splits; by default the one it was trained on.
        tokenizer: tokenizer of the prompts; by default the one of its training.
        splits: names of splits; empty for all held-out splits.
        sequences: number of sequences of each split, spread over it; None for all.
        also: generated samples.
        batch_size: sequences per batch; None for that of evaluations during training.
    """
    if also.prompts and tokenizer is None:
        tokenizer = checkpoint.tokenizer()
    tokens = tokens or checkpoint.sequences.cache
    job = score_job(
        tokens,
        tokenizer,
        checkpoint.model,
        checkpoint.train,
        splits=splits or tokens.held_out_splits,
        sequences=sequences,
        also=also,
        batch_size=batch_size,
    )
    scored = run.gang(hardware, score_process, (job, checkpoint.final))
    step = checkpoint.manifest.shard(checkpoint.result["checkpoint"]).result["step"]
    rows = [{"step": step, **row} for row in scored["rows"]]
    first = rows[0]
    return {
        "split": first["split"],
        **{name: first[name] for name in _FIGURES if name in first},
        "samples": scored["samples"],
        "rows": rows,
    }


def score_process(
    work: tuple[Any, str], *, process: GangProcess, emit: Emit
) -> dict[str, list[Any]]:
    """One process of the gang: load the checkpoint and score it."""
    from contextlib import closing

    from training.evaluate.checkpoint_scorer import Scorer

    del emit
    job, checkpoint = work
    with joined(process), closing(Scorer(job)) as scorer:
        return dataclasses.asdict(scorer.score(scorer.load(checkpoint)))
