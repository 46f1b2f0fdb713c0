"""Score a trained model on held-out splits, whole or in part; `follow` takes the same job."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from models.generate.sampling_config import Sampling
from models.shape.config import TransformerConfig
from models.shape.validation import Count, check_fields, check_value
from pipeline import GangProcess, Hardware, InputError, Result, Runtime, StepContext, local, step
from pipeline.events import Emit
from pipeline.store import storage
from steps.artifacts import Checkpoint, Scores, TokenCache, Tokenizer
from steps.checkpoints.find import check_tokenizer, tokenizer_digest
from steps.declared import check_splits
from steps.gang import FLAGS, joined
from steps.measured import SEQUENCES
from training.config import TrainConfig

if TYPE_CHECKING:
    from training.evaluate.checkpoint_scorer import ScoreJob

_FIGURES = ("loss", "bits_per_byte", "tokens", "bytes")


@dataclass(frozen=True, kw_only=True)
class Also:
    """Generated samples in addition to loss and bits per byte.

    Attributes:
        prompts: texts to continue; they need the tokenizer as an input.
        new_tokens: most tokens of a completion.
        temperature: 0 is greedy.
        top_k: sample among the k likeliest tokens only.
        seed: of the sampling, the same at every checkpoint.
    """

    prompts: tuple[str, ...] = ()
    new_tokens: Count = 64
    temperature: float = 0.8
    top_k: int = 40
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        _ = self.sampling  # its constructor refuses

    @property
    def sampling(self) -> Sampling:
        return Sampling(temperature=self.temperature, top_k=self.top_k, seed=self.seed)


NOTHING_ELSE = Also()


def check_sizes(arguments: Mapping[str, Any]) -> None:
    """Refuse a number of sequences or a batch size that is invalid for every checkpoint."""
    for name in ("sequences", "batch_size"):
        check_value(f"evaluation.{name}", arguments[name], Count | None)


def check_tokens(step: str, model: Checkpoint | TokenCache, tokens: TokenCache) -> None:
    """Refuse tokens of another tokenizer than the model's, see `check_tokenizer`.

    Rows of integers, which name no tokenizer, may be of any.
    """
    if tokenizer_digest(tokens) and tokenizer_digest(model):
        check_tokenizer(step, model, tokens)


def score_job(
    tokens: TokenCache,
    tokenizer: Tokenizer | None,
    model: TransformerConfig,
    train: TrainConfig,
    splits: tuple[str, ...],
    also: Also,
    **sizes: int | None,
) -> ScoreJob:
    """The job of a `Scorer` on the held-out splits of a token cache, as for `evaluate`."""
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
            sampling=also.sampling,
        )
    if tokens.begins:  # a model of documents may have been trained without
        train = dataclasses.replace(train, separate_documents=True)
    return ScoreJob(
        model=model,
        train=train,
        splits=found,
        **sizes,
        token_bytes=tuple(tokens.token_bytes().tolist()),
        eos_id=tokens.result["eos_id"],
        tokenizer=tokens.result["tokenizer"],
        prompts=prompts,
        masked=tokens.masked,
        begins=tokens.begins,
    )


def _check(arguments: Mapping[str, Any]) -> None:
    check_sizes(arguments)
    check_splits("evaluate", arguments["tokens"] or arguments["checkpoint"], arguments["splits"])


@step(output=Scores, version=4, cpus=0, check=_check, environment=FLAGS)
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
        tokens: token cache with the held-out splits, of the model's tokenizer; by default the one
            it was trained on.
        tokenizer: tokenizer of the prompts; by default the one of its training.
        splits: names of splits; empty for all held-out splits.
        sequences: number of sequences of each split, spread over it; None for all.
        also: generated samples.
        batch_size: sequences per batch; None for that of evaluations during training.
    """
    if also.prompts and tokenizer is None:
        tokenizer = checkpoint.tokenizer()
    tokens = tokens or checkpoint.sequences.cache
    check_tokens("evaluate", checkpoint, tokens)
    shape, train, named = checkpoint.model, checkpoint.train, splits or tokens.held_out_splits
    sizes = {"sequences": sequences, "batch_size": batch_size}
    job = score_job(tokens, tokenizer, shape, train, named, also, **sizes)
    scored = run.gang(hardware, score_process, (job, checkpoint.final))
    step = checkpoint.manifest.shard(checkpoint.result["checkpoint"]).result["step"]
    rows = [{"step": step, **row} for row in scored["rows"]]
    first = rows[0]
    with run.shard(SEQUENCES, {"content": None}) as directory:
        text = json.dumps(scored["sequences"]).encode()
        storage.write_atomic(storage.join(directory, f"{SEQUENCES}.json"), text)
    return {
        "split": first["split"],
        **{name: first[name] for name in _FIGURES if name in first},
        "samples": scored["samples"],
        "rows": rows,
    }


def score_process(
    work: tuple[Any, str], *, process: GangProcess, emit: Emit
) -> dict[str, list[Any]]:
    from training.evaluate.checkpoint_scorer import Scorer

    del emit
    job, checkpoint = work
    with joined(process), closing(Scorer(job)) as scorer:
        return dataclasses.asdict(scorer.score(scorer.load(checkpoint)))
