"""The evaluations of a checkpoint, assembled from artifacts; `evaluate` and `follow` share them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from models.generate.sampling_config import Sampling
from models.shape.config import TransformerConfig
from models.shape.validation import Count, check_fields, check_value
from pipeline import InputError
from steps.artifacts import TokenCache, Tokenizer
from training.config import TrainConfig

if TYPE_CHECKING:
    from training.evaluate.checkpoint_scorer import ScoreJob


@dataclass(frozen=True, kw_only=True)
class Also:
    """Generated samples in addition to loss and bits per byte.

    Attributes:
        prompts: texts to continue; they need the tokenizer as an input.
        new_tokens: most tokens of a completion.
        temperature: 0 is greedy.
        top_k: sample among the k likeliest tokens only.
        seed: seed of the sampling, the same at every checkpoint.
    """

    prompts: tuple[str, ...] = ()
    new_tokens: Count = 64
    temperature: float = 0.8
    top_k: int = 40
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        Sampling(temperature=self.temperature, top_k=self.top_k, seed=self.seed)


NOTHING_ELSE = Also()


def check_sizes(arguments: Mapping[str, Any]) -> None:
    """Refuse a number of sequences or a batch size that is invalid for every checkpoint."""
    for name in ("sequences", "batch_size"):
        check_value(f"evaluation.{name}", arguments[name], Count | None)


def score_job(
    tokens: TokenCache,
    tokenizer: Tokenizer | None,
    model: TransformerConfig,
    train: TrainConfig,
    *,
    splits: tuple[str, ...],
    sequences: int | None,
    also: Also,
    batch_size: int | None,
) -> ScoreJob:
    """The job of a `Scorer` on the held-out splits of a token cache.

    Args:
        sequences: number of sequences of each split, spread over it; None for all.
        batch_size: sequences per batch; None for that of evaluations during training.
    """
    from training.config.job import Prompts
    from training.evaluate.checkpoint_scorer import ScoreJob

    found = tokens.named_splits(splits)
    if not found:
        raise InputError(f"{tokens.path}: no held-out split; sample some validation tokens")
    prompts = None
    if tokenizer is not None and also.prompts:
        prompts = Prompts(
            tokenizer=tokenizer.file,
            prompts=also.prompts,
            new_tokens=also.new_tokens,
            sampling=Sampling(temperature=also.temperature, top_k=also.top_k, seed=also.seed),
        )
    return ScoreJob(
        model=model,
        train=train,
        splits=found,
        sequences=sequences,
        batch_size=batch_size,
        token_bytes=tuple(tokens.token_bytes().tolist()),
        eos_id=tokens.result["eos_id"],
        tokenizer=tokens.result["tokenizer"],
        prompts=prompts,
        masked=tokens.masked,
    )
