"""The settings that `ponente tune` searches: layout, batch and head sizes of a train step."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from models.shape.config import TransformerConfig
from pipeline import Hardware
from steps.training.plan.declared_run import DeclaredRun
from training.config import TrainConfig
from training.cost.memory_plan import SHARDINGS

HEAD_SIZES = (64, 128, 256)
MOST_MICROBATCHES = 32
_MESHES = ((1, 1), (2, 1), (1, 2), (4, 1), (2, 2), (1, 4))
"""(sequence, tensor): devices that positions are split among, and devices for heads and MLP."""
_TILE = 256
"""Positions per device are a multiple of this if they are split: two chunks of 128 lanes."""

NOTHING, ROUNDING, TRAINING, MODEL = "", "rounding", "training", "model"
CHANGES = (NOTHING, ROUNDING, TRAINING, MODEL)
"""The effect of settings on a run's output: none; another order of summing gradients; another batch
per step; another model. Each kind includes those before it."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Settings of a train step.

    Attributes:
        model: shape of the model.
        train: with concrete microbatches and sharding; its remat policy is chosen later.
        changes: one of `CHANGES`, compared with the declared run.
    """

    model: TransformerConfig
    train: TrainConfig
    changes: str


def candidates(run: DeclaredRun, batches: Sequence[int] = ()) -> Iterator[Candidate]:
    """Every candidate whose sizes divide."""
    train = run.train
    found = itertools.product(
        _models(run.model),
        (train.batch_size, *(b for b in batches if b != train.batch_size)),
        _microbatches(train),
        _MESHES,
        SHARDINGS,
    )
    for model, batch, parts, (sequence, tensor), sharding in found:
        if batch % parts:
            continue
        tried = dataclasses.replace(
            train,
            batch_size=batch,
            microbatches=parts,
            parallel=dataclasses.replace(
                train.parallel, sharding=sharding, sequence=sequence, tensor=tensor
            ),
        )
        if _divides(model, tried, run.hardware):
            yield Candidate(model=model, train=tried, changes=_changes(run, model, tried))


def _models(model: TransformerConfig) -> list[TransformerConfig]:
    """The model, and variants with other head sizes and the same parameters in every layer."""
    found = [model]
    for size in HEAD_SIZES:
        heads, left = divmod(model.heads * model.head_size, size)
        kv_heads, kv_left = divmod(model.kv_heads * model.head_size, size)
        fits = not left and not kv_left and kv_heads and not heads % kv_heads
        if size != model.head_size and fits:
            found.append(dataclasses.replace(model, heads=heads, kv_heads=kv_heads, head_size=size))
    return found


def _microbatches(train: TrainConfig) -> list[int]:
    powers = [2**k for k in range(MOST_MICROBATCHES.bit_length())]
    return sorted({train.microbatches, *powers})


def _divides(model: TransformerConfig, train: TrainConfig, hardware: Hardware) -> bool:
    """Whether the mesh divides devices, batch, positions and features evenly."""
    sequence, tensor = train.parallel.sequence, train.parallel.tensor
    rows, left = divmod(hardware.devices // hardware.slices, sequence * tensor)
    rows *= hardware.slices
    if left or not rows or train.batch_size % (train.microbatches * rows):
        return False
    if sequence > 1 and train.sequence_length % (sequence * _TILE):
        return False
    sizes = (model.heads, model.kv_heads, model.mlp, model.padded_vocab_size)
    return not any(size % tensor for size in sizes)


def _changes(run: DeclaredRun, model: TransformerConfig, train: TrainConfig) -> str:
    if model != run.model:
        return MODEL
    if train.batch_size != run.train.batch_size:
        return TRAINING
    return NOTHING if train.microbatches == run.train.microbatches else ROUNDING
