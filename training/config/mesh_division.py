"""Whether a model and a batch divide over a mesh of devices; imports no JAX."""

from __future__ import annotations

import math
from collections.abc import Mapping

from models.shape.config import TransformerConfig
from models.shape.footprint import parameter_axes
from pipeline.errors import InputError
from training.config.axis_rules import FSDP, MESH_AXES, assign
from training.config.parallelism import Parallelism
from training.config.train import TrainConfig


def check_model(model: TransformerConfig, parallel: Parallelism, devices: int) -> None:
    """Raise `InputError` unless the mesh divides the devices and the parameters over them.

    `parallel` is without "auto" as sharding.
    """
    mesh, rules = _mesh(parallel, devices), parallel.rules
    applied = [rules.params, rules.optimizer_state or rules.params]
    applied += [rules.compute_params] if mesh[FSDP] > 1 else []
    for axes in parameter_axes(model):
        for each in applied:
            assign(axes, each, mesh)


def check_batch(train: TrainConfig, parallel: Parallelism, devices: int, first: int = 0) -> None:
    """Raise `InputError` unless every microbatch splits evenly over the batch shards.

    `train` is of the batch phase after `first` steps; `parallel` is without "auto" as sharding.
    """
    mesh, axes = _mesh(parallel, devices), parallel.rules.axes("batch")
    shards, microbatches = math.prod(mesh[axis] for axis in axes), train.microbatches
    if train.batch_size % (shards * microbatches):
        raise InputError(
            f"TrainConfig: a batch of {train.batch_size} from step {first} on is not divisible by "
            f"{shards} devices ({' x '.join(f'{axis} {mesh[axis]}' for axis in axes)}) times "
            f"{microbatches} microbatches; choose a multiple of {shards * microbatches}"
        )


def _mesh(parallel: Parallelism, devices: int) -> Mapping[str, int]:
    return dict(zip(MESH_AXES, parallel.mesh_shape(devices), strict=True))
