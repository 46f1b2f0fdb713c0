"""What a run will be on its devices, all choices made, or why it cannot be; imports no JAX.

The trainer builds its programs from this, and `plan` asks it before anything is rented, so both
refuse the same runs, with the same words.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from models.attention.backend_choice import BackendChoice
from models.shape.config import TransformerConfig
from models.shape.footprint import check_chunks
from pipeline.errors import InputError
from training.config import OptimizerConfig, Parallelism, TrainConfig
from training.config.batch_schedule import BatchPhase, batch_phases, largest_of
from training.cost.attention import attention_backend
from training.cost.compiler_options import compiler_options
from training.cost.memory_estimate import Estimate, estimate
from training.cost.memory_plan import Devices, check_batch, divisible, resolve

MATRIX_UNIT = 256
LANES = 128


def lint(
    model: TransformerConfig, parallel: Parallelism, *, platform: str, sequence_length: int
) -> list[str]:
    """One warning for every size that wastes the matrix unit or memory; none except on TPUs."""
    if platform != "tpu":
        return []
    found, width = [], model.heads * model.head_size
    if model.head_size < MATRIX_UNIT:
        better = [size for size in (256, 128) if size > model.head_size and width % size == 0]
        advice = [f"; {width // size} heads of {size} have as many weights" for size in better]
        found.append(
            f"head size {model.head_size} fills {model.head_size / MATRIX_UNIT:.0%} of the matrix "
            f"unit in attention's matmuls, in all {model.layers} layers, and time goes with the "
            f"number of heads{''.join(advice[:1])}"
        )
    advice = f"; set TransformerConfig.vocab_multiple to {MATRIX_UNIT}"
    sizes = [("embed", model.embed, ""), ("mlp", model.mlp, "")]
    for name, size, cure in [*sizes, ("vocab", model.padded_vocab_size, advice)]:
        if size % MATRIX_UNIT:
            found.append(
                f"{name} {size} is not a multiple of {MATRIX_UNIT}: the last tile of each matmul "
                f"with it is partly empty{cure}"
            )
    positions, tensor = sequence_length // parallel.sequence, parallel.tensor
    if positions % LANES:
        found.append(
            f"{positions} positions of a row on one device are not a multiple of {LANES}: every "
            "activation is padded, and the splash kernel cannot run"
        )
    # Contracted axes that `tensor` cuts. Sharded state is gathered before the matmul.
    cut = {"attention output (query features)": width, "MLP down (mlp)": model.mlp}
    for name, size in cut.items():
        if tensor > 1 and size // tensor < MATRIX_UNIT:
            found.append(
                f"{name}: {size} over tensor {tensor} contracts over {size // tensor} numbers on a "
                f"device, fewer than the {MATRIX_UNIT} of the matrix unit"
            )
    return found


@dataclass(frozen=True)
class ResolvedPhase:
    """A batch phase of a run: its program, forecast, memory, record and page are made from this.

    `train` has no "auto", for which `reason` is a sentence; the sharding is the same in all phases.
    """

    model: TransformerConfig
    optimizer: OptimizerConfig
    devices: Devices
    phase: BatchPhase
    train: TrainConfig
    reason: str
    backend: BackendChoice
    estimate: Estimate
    options: Mapping[str, str | bool]


@dataclass(frozen=True)
class ResolvedRun:
    """The phases that are left of a run, at least one; in `evaluation` sequences are not cut."""

    phases: tuple[ResolvedPhase, ...]
    evaluation: BackendChoice

    @property
    def largest(self) -> ResolvedPhase:
        largest = largest_of([each.phase for each in self.phases])
        return next(each for each in self.phases if each.phase is largest)


def resolve_run(
    model: TransformerConfig,
    optimizer: OptimizerConfig,
    train: TrainConfig,
    devices: Devices,
    *,
    done: int = 0,
) -> ResolvedRun:
    """The run on `devices`, with `done` steps behind it; steps and sequence length are known.

    The largest phase that is left decides the sharding.
    """
    left = check_run(model, optimizer, train, devices, done=done)
    largest = largest_of(left)
    decided = resolve(model, optimizer, largest.config(train), devices)
    train = dataclasses.replace(train, parallel=decided[0].parallel)
    for phase in left:  # again, as rules may divide batches differently by sharding
        check_batch(phase.config(train), train.parallel, devices.count, phase.first)
    platform, chip, count = devices.platform, devices.chip, devices.count
    options = compiler_options(platform, chip, count, train.compiler_options)
    chosen = {}
    for phase in (largest, *left):
        if (shape := (phase.rows, phase.pieces)) in chosen:
            continue
        config, reason = decided
        if phase is not largest:
            config, reason = resolve(model, optimizer, phase.config(train), devices)
        backend = attention_backend(model, config, platform, chip)
        size = estimate(model, optimizer, config, count, platform=platform, chip=chip)
        chosen[shape] = config, reason, backend, size
    phases = tuple(
        ResolvedPhase(model, optimizer, devices, each, *chosen[each.rows, each.pieces], options)
        for each in left
    )
    return ResolvedRun(phases, attention_backend(model, train, platform, chip))


def check_run(
    model: TransformerConfig,
    optimizer: OptimizerConfig,
    train: TrainConfig,
    devices: Devices,
    *,
    done: int = 0,
) -> tuple[BatchPhase, ...]:
    """The phases that are left of a run which can be: `resolve_run` without its choices.

    Without `train.steps` only the first phase is checked: others may lie beyond the run's end.
    """
    check_lengths(model, optimizer, train)
    every = batch_phases(train)
    left = tuple(phase for phase in every if phase.end > done) or every[-1:]
    left = left if train.steps else left[:1]
    for shape in {(phase.rows, phase.pieces): phase for phase in left}.values():
        config = shape.config(train)
        for parallel in divisible(model, train.parallel, devices)[:1]:
            check_batch(config, parallel, devices.count, shape.first)
        attention_backend(model, config, devices.platform, devices.chip)
        if config.loss_chunks != "auto":
            positions = config.sequence_length // config.parallel.sequence
            check_chunks(positions, int(config.loss_chunks))
    return left


def check_lengths(
    model: TransformerConfig | None, optimizer: OptimizerConfig, train: TrainConfig
) -> None:
    """Refuse a schedule longer than the run, and sequences longer than the learned positions.

    Where one of them is not known (None, 0), nothing is refused.
    """
    if train.steps:
        optimizer.phases(train.steps)
    context = None if model is None else model.context
    if context is not None and train.sequence_length > context:
        raise InputError(
            f"TrainConfig.sequence_length: {train.sequence_length} is more than the {context} "
            "learned positions of TransformerConfig.context; change one of them"
        )
