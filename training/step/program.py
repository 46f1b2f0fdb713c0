"""The jitted steps of a run for one set of devices, real ones or those of a topology description.

Everything that decides the compiled program is chosen here: mesh, optimizer, schedule, attention
backend. A preflight builds the same `Program` for a topology description and lowers it without a
device; the training loop builds it for `jax.devices()` and runs it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from models.attention.dispatch import BackendChoice, choose_backend
from models.config import TransformerConfig
from models.remat import checkpoint_policy
from pipeline.accelerators import chip_of
from training.config import OptimizerConfig, TrainConfig
from training.config.batch_schedule import BatchPhase, batch_phases, largest_phase
from training.cost.memory_estimate import Estimate, estimate
from training.cost.memory_plan import resolve
from training.cost.shape_lint import lint
from training.optimizer.build import build
from training.optimizer.lr_schedule import schedule
from training.sharding.layout import Layout, check_batch, make_layout
from training.sharding.mesh import slice_count
from training.step.document_mask import Boundaries
from training.step.evaluation_step import EvaluationStep, make_evaluation_step
from training.step.state import TrainState, abstract_state, init_state
from training.step.train_step import make_train_step


@dataclass(frozen=True)
class Program:
    """A train step and an evaluation step with the layout they run on.

    Attributes:
        step: jitted, see `training.step.train_step.make_train_step`.
        evaluation_step: jitted, see `training.step.evaluation_step.make_evaluation_step`.
        train: the configuration with every "auto" resolved.
        backend: attention backend; `backend_reason` is why it was chosen.
        notes: sentences for the log: the backend, memory settings, and shapes that waste the chip.
        abstract: shapes, dtypes and shardings of the state.
        estimate: estimated memory of one device, by content.
    """

    model: TransformerConfig
    train: TrainConfig
    layout: Layout
    optimizer: optax.GradientTransformation
    step: jax.stages.Wrapped
    evaluation_step: EvaluationStep
    backend: str
    backend_reason: str
    notes: tuple[str, ...]
    abstract: TrainState
    estimate: Estimate

    def init(self) -> TrainState:
        """The state at step 0."""
        return init_state(
            self.model, self.optimizer, self.train, self.abstract, self.layout.platform
        )

    def abstract_batch(self) -> jax.ShapeDtypeStruct:
        """Shape and sharding of the tokens that the step takes, int32 [batch, position]."""
        shape = (self.train.batch_size, self.train.sequence_length)
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self.layout.batch)

    def compile(self) -> jax.stages.Compiled:
        """The compiled train step; calling it with other shapes is an error."""
        return self.lower().compile()

    def lower(self) -> jax.stages.Lowered:
        """The lowered train step; its `.compile()` needs the devices' compiler, but no device."""
        return self.step.lower(self.abstract, self.abstract_batch())


def build_program(
    model: TransformerConfig,
    optimizer: OptimizerConfig,
    train: TrainConfig,
    devices: Sequence[jax.Device],
    *,
    eos_id: int,
    padded: bool = False,
    masked: bool = False,
) -> Program:
    """The program of a run on `devices`; nothing is compiled yet.

    Args:
        model: shape of the model.
        optimizer: the optimizer and its schedule.
        train: batches and how to compute on them.
        devices: real devices, or those of a topology description.
        eos_id: the id that ends a document.
        padded: whether sequences may end in padding.
        masked: whether ids are stored with a loss mask, see `training.step.document_mask`.

    Raises:
        InputError: when batch, fsdp, schedule, remat or attention do not fit model or devices.
    """
    train, reason = resolved(model, optimizer, train, devices)
    layout = make_layout(devices, train.parallel)
    check_batch(layout, train.batch_size, train.microbatches)
    checkpoint_policy(train.remat)  # raises for an unknown setting here and not while tracing
    platform = devices[0].platform
    backend, backend_reason = attention_backend(model, train, platform)
    parallel, length = train.parallel, train.sequence_length
    wasteful = lint(model, parallel, platform=platform, sequence_length=length)
    transformation = build(optimizer)
    rate = schedule(optimizer, train.steps)
    boundaries = Boundaries(
        eos_id=eos_id,
        separate=train.separate_documents,
        padded=padded,
        masked_from=model.vocab_size if masked else None,
    )
    abstract = abstract_state(model, transformation, layout, train)
    return Program(
        model=model,
        train=train,
        layout=layout,
        optimizer=transformation,
        step=make_train_step(train, transformation, rate, layout, backend, boundaries, abstract),
        evaluation_step=make_evaluation_step(train, layout, backend, boundaries),
        backend=backend,
        backend_reason=backend_reason,
        notes=(backend_reason, reason, *wasteful),
        abstract=abstract,
        estimate=estimate(model, optimizer, train, len(devices), platform=platform),
    )


def phase_programs(
    program: Program,
    optimizer: OptimizerConfig,
    train: TrainConfig,
    devices: Sequence[jax.Device],
    **setting: Any,
) -> list[tuple[BatchPhase, Program]]:
    """A program for each batch phase of the run; all shard the state as `program` does.

    Args:
        program: the program of the run.
        optimizer, train, devices, setting: arguments that `program` was built from.

    Raises:
        InputError: when a phase's batch does not fit the devices.
    """
    found = batch_phases(train)
    if _uniform(train):
        return [(found[0], program)]
    train = dataclasses.replace(train, parallel=program.train.parallel)
    return [
        (phase, build_program(program.model, optimizer, phase.config(train), devices, **setting))
        for phase in found
    ]


def _uniform(train: TrainConfig) -> bool:
    """Whether the run is one phase, with batches of `batch_size` uncut sequences."""
    return [(p.rows, p.pieces) for p in batch_phases(train)] == [(train.batch_size, 1)]


def attention_backend(model: TransformerConfig, train: TrainConfig, platform: str) -> BackendChoice:
    """The attention backend of a run, see `choose_backend`."""
    return choose_backend(
        train.attention,
        platform,
        position=train.sequence_length,
        head_size=model.head_size,
        soft_cap=model.attention_soft_cap,
        segments=train.separate_documents,
        window=model.window,
        dtype=train.compute_dtype,
        sequence_shards=train.parallel.sequence,
    )


def resolved(
    model: TransformerConfig,
    optimizer: OptimizerConfig,
    train: TrainConfig,
    devices: Sequence[jax.Device],
) -> tuple[TrainConfig, str]:
    """`training.cost.memory_plan.resolve` for real or described devices.

    With batch phases, the largest decides the sharding, which is the same in all.
    """

    def resolve_here(train: TrainConfig) -> tuple[TrainConfig, str]:
        return resolve(
            model,
            optimizer,
            train,
            len(devices),
            platform=devices[0].platform,
            limit=memory_limit(devices[0]),
            slices=slice_count(devices),
        )

    if not _uniform(train):
        largest, _ = resolve_here(largest_phase(train).config(train))
        train = dataclasses.replace(train, parallel=largest.parallel)
    return resolve_here(train)


def memory_limit(device: jax.Device) -> float | None:
    """Bytes that a program may use on a device; None when the limit is unknown."""
    chip = chip_of(device.device_kind)
    if chip is not None and chip.usable is not None:
        return chip.usable
    if device.platform == "cpu":  # its limit is a share of the host's memory, not what is free
        return None
    return (device.memory_stats() or {}).get("bytes_limit")
