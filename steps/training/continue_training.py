"""Continue training from a checkpoint: `extend` its run, or `warm_start` a new run with it.

The graph states which parts of the checkpoint are used; they are never inferred from its files.
Moments that are reset by accident on trained parameters can undo hours of training.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from models.shape.changes import check_same_parameters
from models.shape.config import TransformerConfig
from pipeline import Hardware, InputError, Result, Runtime, StepContext, local, step
from pipeline.graph.facts import Facts, Results
from pipeline.graph.step import Node
from steps.artifacts import Checkpoint, Sequences
from steps.checkpoints.find import Continued, check_tokenizer
from steps.declared import check_training, declared_model
from steps.training.budget import resolved
from steps.training.plan.continued import (
    check_data,
    check_state,
    checkpoint_at,
    continued_optimizer,
    continues,
    steps_of_checkpoint,
)
from steps.training.plan.facts import training_facts
from steps.training.train import TRAINS, run_training
from training.config import OptimizerConfig, TrainConfig
from training.config.job import Start


def _check(arguments: Mapping[str, Any], take: str) -> None:
    if not arguments["train"].steps:
        raise InputError("TrainConfig.steps: expected the total number of steps, found none")
    check_state(arguments, take)
    done, checkpoint, model = 0, arguments["checkpoint"], arguments["model"]
    declared = declared_model(checkpoint)
    if model is not None and declared is not None:
        check_same_parameters(declared, model)
    if take == "everything":
        known = steps_of_checkpoint(checkpoint, arguments["at"], {})
        # Where the steps of a selected run differ, only the last step is sure to be left.
        done = arguments["train"].steps - 1 if known is None else known
        arguments = {**arguments, "optimizer": continued_optimizer(arguments, checkpoint, {})}
    check_training(arguments, model or declared, done)


def _check_extend(arguments: Mapping[str, Any]) -> None:
    at, steps = arguments["at"], arguments["train"].steps
    if at is not None and not 0 < at < steps:
        raise InputError(
            f"extend: expected `at` of 1 or more and below the {steps} steps of `train`, got {at}; "
            "train.steps counts from the very first step"
        )
    _check(arguments, "everything")


def _facts(node: Node, results: Results) -> Facts:
    checkpoint_at(node, results)
    check_data(node, results)
    return training_facts(node, results)


@step(output=Checkpoint, version=5, check=_check_extend, facts=_facts, **TRAINS)
def extend(
    run: StepContext,
    checkpoint: Checkpoint,
    sequences: Sequences,
    *,
    optimizer: OptimizerConfig,
    train: TrainConfig,
    at: int | None = None,
    model: TransformerConfig | None = None,
    splits: tuple[str, ...] = (),
    sample_prompts: tuple[str, ...] = (),
    hardware: Annotated[Hardware, Runtime] = local(),
) -> Result:
    """The same run with more steps, or from step `at` with another end of its schedule.

    Parameters, moments, step, data offset and history continue; `train.steps` counts from the very
    first step. A "wsd" run, for example, keeps a checkpoint before its decay
    (`TrainConfig.milestones`) and is extended from there with more steps. The schedule is that of
    the longer run, but its warmup stays that of the first run and its decay begins at `at` or later
    (`OptimizerConfig.continued`); a step warns when its rate still differs from the one before.

    An imported model has no step and no moments: like `warm_start` with take="model", the run
    starts at step 0 with zero moments, and the step warns about it.

    Args:
        sequences: the same ones as in training, or these `without` documents that the checkpoint
            has not read; for an imported model any of its tokenizer.
        optimizer: of the same kind as in training; schedule and learning rates may differ.
        train: with more steps than the checkpoint has done.
        at: step of the checkpoint to continue from; None for the last one.
        model: the checkpoint's model with other rotary positions, windows or soft caps, which
            change no parameter (`models.shape.changes.CHANGEABLE`); None for the checkpoint's own.
        splits, sample_prompts, hardware: as for `train`.
    """
    train, take, first = resolved(train, sequences), "everything", 0
    if checkpoint.imported:
        check_tokenizer("extend", checkpoint, sequences.cache)
        run.warn(
            f"{checkpoint.path} was imported without moments: they are zero at step 0 of this run, "
            'as of warm_start(..., take="model")'
        )
        take = "model"
    elif not continues(checkpoint.sequences.manifest.content, sequences):
        raise InputError(
            f"extend: {checkpoint.path} was trained on {checkpoint.sequences.path}, these "
            f"sequences are {sequences.path}; to train on other data use warm_start"
        )
    else:
        done, first = checkpoint.train.steps, checkpoint.first_steps
        optimizer = optimizer.continued(at or done, train.steps, first)
    shape, start = model or checkpoint.model, _start(checkpoint, model, take, at)
    job = (run, sequences, shape, optimizer, train, splits, sample_prompts, hardware)
    above = Continued(checkpoint.path, at, extends=take == "everything")
    return run_training(*job, start=start, continued=above, first_steps=first)


def _check_warm_start(arguments: Mapping[str, Any]) -> None:
    if (take := arguments["take"]) not in ("model", "moments"):
        raise InputError(
            f'warm_start: expected take="model" or take="moments", got {take!r}; to continue '
            "the same run use extend"
        )
    _check(arguments, take)


@step(output=Checkpoint, version=5, check=_check_warm_start, facts=_facts, **TRAINS)
def warm_start(
    run: StepContext,
    checkpoint: Checkpoint,
    sequences: Sequences,
    *,
    take: str,
    optimizer: OptimizerConfig,
    train: TrainConfig,
    at: int | None = None,
    model: TransformerConfig | None = None,
    splits: tuple[str, ...] = (),
    sample_prompts: tuple[str, ...] = (),
    hardware: Annotated[Hardware, Runtime] = local(),
) -> Result:
    """A new run that starts with trained parameters, at step 0 of its own schedule and data.

    Args:
        sequences: training data of the checkpoint's tokenizer.
        take: "model" for parameters alone, "moments" for parameters and the optimizer's moments.
        at, model: as for `extend`; `model` for longer sequences than the checkpoint's, say.
        splits, sample_prompts, hardware: as for `train`.
    """
    if checkpoint.imported and take == "moments":
        raise InputError(
            f'warm_start: {checkpoint.path} was imported and has no moments; take="model"'
        )
    check_tokenizer("warm_start", checkpoint, sequences.cache)
    shape, start = model or checkpoint.model, _start(checkpoint, model, take, at)
    train = resolved(train, sequences)
    job = (run, sequences, shape, optimizer, train, splits, sample_prompts, hardware)
    return run_training(*job, start=start, continued=Continued(checkpoint.path, at, extends=False))


def _start(
    checkpoint: Checkpoint, model: TransformerConfig | None, take: str, at: int | None
) -> Start:
    if model is not None:
        check_same_parameters(checkpoint.model, model)
    done = at or max(checkpoint.steps, default=0) if take == "everything" else 0
    return Start(checkpoint=checkpoint.at(at), take=take, step=done)
