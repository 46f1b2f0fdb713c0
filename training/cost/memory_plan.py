"""Resolves "auto" of remat, sharding, loss chunks and offload to settings that fit in memory.

An estimate may fill a device completely: the compiler's peak of a program that fits is lower
(docs/models.md).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from models.shape.config import TransformerConfig
from models.shape.footprint import LOGIT_BUDGET_BYTES, chunk_count, footprint, parameter_axes
from models.shape.remat_names import BLOCK_INPUT, MATMULS
from pipeline.errors import InputError
from training.config import OptimizerConfig, Parallelism, TrainConfig
from training.config.parallelism import FSDP, MESH_AXES, Sharding, assign
from training.cost.executed_flops import block_flops, orthogonalization_flops, recomputed
from training.cost.memory_estimate import GIB, Estimate, estimate
from training.cost.step_work import HOST_CHIPS


def check_model(model: TransformerConfig, parallel: Parallelism, devices: int) -> None:
    """Raise `InputError` unless the mesh divides the devices and the parameters over them."""
    mesh, rules = _mesh(parallel, devices), parallel.rules
    applied = [rules.params, rules.optimizer_state or rules.params]
    applied += [rules.compute_params] if mesh[FSDP] > 1 else []
    for axes in parameter_axes(model):
        for each in applied:
            assign(axes, each, mesh)


def check_batch(train: TrainConfig, parallel: Parallelism, devices: int, first: int = 0) -> None:
    """Raise `InputError` unless every microbatch, after `first` steps, splits over the shards."""
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


def logit_budget(platform: str) -> int:
    """Bytes for the float32 logits of one chunk: of a CPU nearer to the size of its caches."""
    return 16 * 2**20 if platform == "cpu" else LOGIT_BUDGET_BYTES


SHARDINGS: dict[Sharding, float] = {"replicated": 0.0, "zero1": 0.01, "fsdp": 0.1}
"""Cost of each sharding for "auto", as a share of the forward pass: gathering parameters once a
step is nearly free, gathering them layer by layer twice costs as much as 10 % of recomputation."""
REDUCTION = 0.001
"""Cost of the worse way to reduce gradients: never worth recomputing a matmul."""
OFFLOADED = f"offload:{BLOCK_INPUT}"
"""The remat setting with the least memory: blocks are recomputed, and their inputs offloaded."""


@dataclass(frozen=True)
class Devices:
    """The devices of a run: "tpu", "gpu" or "cpu", and their number.

    Attributes:
        limit: bytes that a program may use on one of them; None when not known.
        slices: that they form; no state is sharded over several.
        chip: their name in `pipeline.accelerators`; empty for others.
        per_host: GPUs of a host.
    """

    platform: str
    count: int
    limit: float | None = None
    slices: int = 1
    chip: str = ""
    per_host: int = HOST_CHIPS


def divisible(
    model: TransformerConfig, chosen: Parallelism, devices: Devices
) -> tuple[Parallelism, ...]:
    """`chosen` with each sharding over which the model divides; refused if there is none."""
    found: list[Parallelism] = []
    failure: InputError | None = None
    for sharding in tuple(SHARDINGS) if chosen.sharding == "auto" else (chosen.sharding,):
        shape = dataclasses.replace(chosen, sharding=sharding, reduce="auto")
        shape = shape.within_slices(devices.count, devices.slices)
        shape.mesh_shape(devices.count)  # a group that no mesh has is refused for "auto" too
        try:
            parallel = dataclasses.replace(shape, reduce=chosen.reduce)
            check_model(model, parallel, devices.count)
            found.append(parallel)
        except InputError as error:
            failure = failure or error
    if failure is not None and not found:
        raise failure
    return tuple(found)


def resolve(
    model: TransformerConfig, optimizer: OptimizerConfig, train: TrainConfig, devices: Devices
) -> tuple[TrainConfig, str]:
    """`train`, of one batch phase, without "auto", and a sentence with the reason.

    Chooses the cheapest combination that fits; recomputed FLOPs, a sharded state, and the matmuls
    of Muon on one device have a cost. If none fits, it offloads the optimizer state, which moves
    once a step; then residuals, which move in every layer of every microbatch; then both. If still
    none fits, it chooses the smallest. A device of unknown memory is assumed to have enough.
    """
    candidates = []
    count, platform, limit = devices.count, devices.platform, devices.limit
    tokens = train.batch_size * train.sequence_length / count
    forward = tokens * model.layers * block_flops(model, train.sequence_length)
    memory = train.parallel.optimizer_memory
    places: list[Literal["auto", "device", "host"]] = [memory]
    places = ["device", "host"] if memory == "auto" else places
    shardings = [
        way
        for each in divisible(model, train.parallel, devices)
        for way in _reductions(each, train.microbatches)
    ]
    # Inside a slice of TPUs, reductions run beside the matmuls; elsewhere a step waits for them.
    hidden = count == 1 or (platform == "tpu" and devices.slices == 1)
    better = "microbatch" if hidden else "step"
    chunks = {each: _chunks(model, train, each, count, platform) for each in shardings}
    for remat, sharding, place in itertools.product(_remats(model, train), shardings, places):
        parallel = dataclasses.replace(sharding, optimizer_memory=place)
        made = {"remat": remat, "parallel": parallel, "loss_chunks": chunks[sharding]}
        found = dataclasses.replace(train, **made)
        size = estimate(model, optimizer, found, count, platform=platform, chip=devices.chip)
        # Ranked by offload first (none, optimizer state, residuals, both), then by cost.
        offload = (2 if remat == OFFLOADED else 0) + (place == "host")
        cost = recomputed(model, remat, train.sequence_length) + SHARDINGS[parallel.sharding]
        _, group, _, tensor = parallel.mesh_shape(count)
        cost += orthogonalization_flops(model, optimizer, group * tensor) / forward
        cost += REDUCTION * (parallel.reduce != better)
        candidates.append(((offload, cost), size.total, len(candidates), found, size))
    fitting = [c for c in candidates if limit is None or c[1] <= limit]
    *_, found, size = min(fitting) if fitting else min(candidates, key=lambda c: c[1])
    if train.loss_chunks == "auto" and platform != "cpu" and fitting and limit is not None:
        found, size = _larger_chunks(model, optimizer, found, size, devices)
    return found, _reason(found, size, limit, recomputed(model, found.remat, train.sequence_length))


def _reductions(parallel: Parallelism, microbatches: int) -> list[Parallelism]:
    """`parallel` with each way to reduce gradients that makes a difference and that it allows."""
    if parallel.reduce != "auto":
        return [parallel]
    each = dataclasses.replace(parallel, reduce="microbatch")
    once = microbatches > 1 and parallel.can_reduce_once
    return [dataclasses.replace(parallel, reduce="step"), each] if once else [each]


def _remats(model: TransformerConfig, train: TrainConfig) -> list[str]:
    """The remat settings to compare, from all matmuls kept to none, and blocks' inputs offloaded.

    In between, attention's result and output projection are kept with every subset of the others.
    """
    if train.remat != "auto":
        return [train.remat]
    always = ("attention_residuals", "mlp_input")
    others = [name for name in MATMULS if name not in always and footprint(model).widths[name]]
    subsets = itertools.chain.from_iterable(
        itertools.combinations(others, count) for count in range(1, len(others))
    )
    partial = ["save:" + ",".join((*always, *subset)) for subset in (*subsets, ())]
    return ["matmuls", *partial, "save:attention_residuals", "full", OFFLOADED]


def _chunks(
    model: TransformerConfig, train: TrainConfig, parallel: Parallelism, devices: int, platform: str
) -> int:
    if train.loss_chunks != "auto":
        return int(train.loss_chunks)
    data, group, sequence, tensor = parallel.mesh_shape(devices)
    return chunk_count(
        train.batch_size // train.microbatches,
        train.sequence_length // sequence,
        model.padded_vocab_size // tensor,
        shards=data * group,
        budget=logit_budget(platform),
    )


def _larger_chunks(
    model: TransformerConfig,
    optimizer: OptimizerConfig,
    train: TrainConfig,
    size: Estimate,
    devices: Devices,
) -> tuple[TrainConfig, Estimate]:
    """Fewer chunks of the loss, if they fit, until one has as many tokens as the head has columns.

    Each chunk reads and writes the head's whole float32 gradient, [vocab, embed]. With fewer tokens
    that is more than the chunk's logits, [tokens, vocab].
    """
    assert devices.limit is not None
    data, group, sequence, _ = train.parallel.mesh_shape(devices.count)
    shards = data * group * sequence * train.microbatches
    tokens = train.batch_size * train.sequence_length / shards
    chunks = int(train.loss_chunks)
    where = {"platform": devices.platform, "chip": devices.chip}
    while chunks % 2 == 0 and tokens / chunks < model.embed:
        chunks //= 2
        wider = dataclasses.replace(train, loss_chunks=chunks)
        larger = estimate(model, optimizer, wider, devices.count, **where)
        if larger.total > devices.limit:
            break
        train, size = wider, larger
    return train, size


def _reason(train: TrainConfig, size: Estimate, limit: float | None, again: float) -> str:
    repeats = f"repeats {again:.0%} of the blocks' forward FLOPs" if again else "no matmul twice"
    chosen = (
        f"remat {train.remat} ({repeats}), sharding {train.parallel.sharding}, "
        f"{train.loss_chunks} loss chunks"
    )
    if train.microbatches > 1:
        chosen += f", gradients reduced each {train.parallel.reduce}"
    if train.parallel.optimizer_memory == "host":
        chosen += ", optimizer state in the host's memory"
    if limit is None:
        return f"{chosen}: the memory of a device is not known"
    most = f"{limit / GIB:.1f} GiB"
    if size.total <= limit:
        return f"{chosen}: estimated {size} of {most}"
    return f"{chosen}: estimated {size}, more than {most}; use more microbatches or devices"
