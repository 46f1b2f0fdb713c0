"""The evaluations of a checkpoint, assembled from artifacts; `evaluate` and `follow` share them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from models.generate.sampling_config import Sampling
from models.shape.config import TransformerConfig
from models.shape.validation import Count, at_least, check_value
from pipeline import InputError
from steps.artifacts import TokenCache, Tokenizer
from training.config import TrainConfig

if TYPE_CHECKING:
    from training.evaluate.checkpoint_scorer import ScoreJob


@dataclass(frozen=True, kw_only=True)
class Also:
    """Evaluations in addition to loss and bits per byte.

    Attributes:
        prompts: texts to continue; they need the tokenizer as an input.
        new_tokens: most tokens of a completion.
        temperature: 0 is greedy.
        top_k: sample among the k likeliest tokens only.
        seed: seed of the sampling, the same at every checkpoint.
        questions: most multiple-choice questions, from the first split: which continuation is the
            passage's own? 0 for none.
        context_tokens, continuation_tokens: lengths of the parts of a question.
        choices: number of continuations to choose from.
    """

    prompts: tuple[str, ...] = ()
    new_tokens: int = 64
    temperature: float = 0.8
    top_k: int = 40
    seed: int = 0
    questions: int = 0
    context_tokens: int = 64
    continuation_tokens: int = 16
    choices: int = 4

    def __post_init__(self) -> None:
        at_least("Also", new_tokens=(self.new_tokens, 1), questions=(self.questions, 0))
        at_least("Also", context_tokens=(self.context_tokens, 1), choices=(self.choices, 2))
        at_least("Also", continuation_tokens=(self.continuation_tokens, 1))
        Sampling(temperature=self.temperature, top_k=self.top_k, seed=self.seed)


NOTHING_ELSE = Also()


def check_questions(arguments: Mapping[str, Any]) -> None:
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
    """The job of a `Scorer`.

    Args:
        tokens: token cache with the held-out splits.
        tokenizer: tokenizer of the prompts; None without prompts.
        model: shape of the model.
        train: configuration of its training.
        splits: names of held-out splits.
        sequences: number of sequences of each split, spread over it; None for all.
        also: further evaluations.
        batch_size: sequences per batch; None for that of evaluations during training.

    Raises:
        InputError: the cache has no such split, no split is named, or questions are asked about
            rows of integers.
    """
    from models.generate.sampling_config import Sampling
    from training.config.job import Prompts
    from training.evaluate.checkpoint_scorer import ScoreJob
    from training.evaluate.continuation_task import Passages

    found = tokens.named_splits(splits)
    if not found:
        raise InputError(f"{tokens.path}: no held-out split; sample some validation tokens")
    prompts = passages = None
    if tokenizer is not None and also.prompts:
        prompts = Prompts(
            tokenizer=tokenizer.file,
            prompts=also.prompts,
            new_tokens=also.new_tokens,
            sampling=Sampling(temperature=also.temperature, top_k=also.top_k, seed=also.seed),
        )
    if also.questions:
        if tokens.masked:
            raise InputError(
                f"{tokens.path}: questions are about documents, and rows of integers have none; "
                "leave out Also.questions"
            )
        passages = Passages(
            name=found[0][0],
            shards=found[0][1],
            items=also.questions,
            context=also.context_tokens,
            continuation=also.continuation_tokens,
            choices=also.choices,
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
        passages=passages,
        masked=tokens.masked,
    )
