"""Score a trained model on a whole held-out split."""

from __future__ import annotations

from typing import Annotated, Any

from models.config import TransformerConfig
from pipeline import GangProcess, Hardware, InputError, Result, Runtime, StepRun, local, step
from pipeline.run import Emit
from steps.artifacts import VALIDATION, Checkpoint, Scores, TokenCache
from steps.gang import coordinator_of
from training.config import TrainConfig


@step(output=Scores, version=1, cpus=0)
def evaluate(
    run: StepRun,
    model: Checkpoint,
    tokens: TokenCache,
    *,
    split: str = VALIDATION,
    hardware: Annotated[Hardware, Runtime] = local(),
) -> Result:
    """Loss (nats per token) and bits per byte over every sequence of `split`."""
    from training.scoring import ScoreJob

    shards = tokens.split(split)
    if not shards:
        raise InputError(f"{tokens.path}: no {split!r} split; sample some {split} tokens")
    job = ScoreJob(
        checkpoint=model.final,
        model=TransformerConfig.from_plain(model.result["model"]),
        train=TrainConfig.from_plain(model.result["train"]),
        shards=shards,
        token_bytes=tuple(tokens.token_bytes().tolist()),
        eos_id=tokens.result["eos_id"],
        tokenizer=tokens.result["tokenizer"],
    )
    scores = run.gang(hardware, score_process, job)
    return {"split": split, **scores}


def score_process(job: Any, *, process: GangProcess, emit: Emit) -> dict[str, float]:
    """One process of the gang."""
    from training.scoring import score

    del emit
    return score(job, coordinator=coordinator_of(process))
