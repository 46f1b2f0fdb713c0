"""The jitted steps of a run for one set of devices, real ones or those of a topology description.

Everything that decides the compiled program is chosen here: mesh, optimizer, schedule, attention
backend. A preflight builds the same `Program` for a topology description and lowers it without a
device; the training loop builds it for `jax.devices()` and runs it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from models.jax_numerics import random_key
from models.jax_versions import WITHOUT_MLIR
from models.layers.scan_layers import checkpoint_policy
from models.shape.config import TransformerConfig
from pipeline.accelerators import chip_of
from pipeline.errors import InputError
from training.config import OptimizerConfig, TrainConfig
from training.config.batch_schedule import BatchPhase
from training.cost.memory_estimate import Estimate
from training.cost.memory_plan import Devices
from training.cost.resolved_run import ResolvedPhase, lint, resolve_run
from training.optimizer import build, schedule
from training.sharding.layout import Layout, make_layout, slice_count
from training.step.state import TrainState, abstract_state, maker, shardings_of
from training.step.train_step import (
    Boundaries,
    EvaluationStep,
    LossFunction,
    make_evaluation_step,
    make_train_step,
)


@dataclass(frozen=True)
class Program:
    """A train step and an evaluation step with the layout they run on.

    Attributes:
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
        """A new state from `train.seed`; every array is created with its own sharding."""
        # It runs once, and on a CPU its optimization takes longer than its execution: 1.1 s of CPU
        # time with these options instead of 4.3 s at 4 layers of embed 128, to the same bits.
        cpu = {"xla_backend_optimization_level": 1, **WITHOUT_MLIR}
        make = jax.jit(
            maker(self.model, self.optimizer, self.train),
            out_shardings=shardings_of(self.abstract),
            compiler_options=cpu if self.layout.platform == "cpu" else None,
        )
        return make(random_key(self.train.seed or 0))

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
    **setting: Any,
) -> Program:
    """The program of the run's largest batch phase, see `build_programs`."""
    return build_programs(model, optimizer, train, devices, **setting).largest


class Programs(NamedTuple):
    """The programs of a run: of each batch phase that is left, and of the largest of these.

    `refused` says why phases before these cannot be, if they may still be needed.
    """

    phases: tuple[tuple[BatchPhase, Program], ...]
    largest: Program
    refused: InputError | None = None


def build_programs(
    model: TransformerConfig,
    optimizer: OptimizerConfig,
    train: TrainConfig,
    devices: Sequence[jax.Device],
    *,
    eos_id: int,
    padded: bool = False,
    masked: bool = False,
    begins: bool = False,
    done: int = 0,
) -> Programs:
    """The programs of a run on `devices`, real or described; nothing is compiled yet.

    `eos_id`, `padded`, `masked` and `begins` are those of `Boundaries`; `done` steps are behind the
    run. What `training.cost.resolved_run` refuses is refused.
    """
    found = resolve_run(model, optimizer, train, described(devices), done=done)
    layout = make_layout(devices, found.largest.train.parallel)
    checkpoint_policy(found.largest.train.remat)  # raises here and not while tracing
    transformation = build(optimizer, layout, train.compute_dtype, train.steps)
    rate = schedule(optimizer, train.steps)
    boundaries = Boundaries(
        eos_id=eos_id,
        separate=train.separate_documents,
        padded=padded,
        masked_from=model.vocab_size if masked else None,
        begins=begins,
    )
    abstract = abstract_state(model, transformation, layout, train)
    unpadded = dataclasses.replace(boundaries, padded=False)
    evaluation_step = make_evaluation_step(train, layout, found.evaluation.backend, unpadded)

    def program(resolved: ResolvedPhase) -> Program:
        config, (backend, backend_reason) = resolved.train, resolved.backend
        parallel, length = config.parallel, config.sequence_length
        wasteful = lint(model, parallel, platform=layout.platform, sequence_length=length)
        loss = LossFunction(config, layout, backend, boundaries)
        return Program(
            model=model,
            train=config,
            layout=layout,
            optimizer=transformation,
            step=make_train_step(loss, transformation, rate, abstract, resolved.options),
            evaluation_step=evaluation_step,
            backend=backend,
            backend_reason=backend_reason,
            notes=(backend_reason, resolved.reason, *wasteful),
            abstract=abstract,
            estimate=resolved.estimate,
        )

    programs = tuple((each.phase, program(each)) for each in found.phases)
    return Programs(programs, dict(programs)[found.largest.phase])


def described(devices: Sequence[jax.Device]) -> Devices:
    """What the choices of a run depend on, of real devices or of a topology description."""
    first, chip = devices[0], chip_of(devices[0].device_kind)
    limit, name = memory_limit(first), "" if chip is None else chip.name
    found = Devices(first.platform, len(devices), limit, slice_count(devices), name)
    if first.platform != "gpu":
        return found
    hosts = len({device.process_index for device in devices})
    return dataclasses.replace(found, per_host=len(devices) // hosts)


def memory_limit(device: jax.Device) -> float | None:
    """Bytes that a program may use on a device; None when the limit is unknown."""
    chip = chip_of(device.device_kind)
    if chip is not None and chip.usable is not None:
        return chip.usable
    if device.platform == "cpu":  # its limit is a share of the host's memory, not what is free
        return None
    return (device.memory_stats() or {}).get("bytes_limit")
