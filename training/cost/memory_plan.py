"""The settings of memory that fit: what "auto" of remat, sharding, loss chunks and offload means.

Of the combinations that `training.cost.memory_estimate` says fit, the cheapest is taken; the host's
memory is used where nothing fits without. A device whose memory is not known is taken to have
enough. An estimate may fill a device: what it counts is there at one moment at most, and the peak
that the compiler finds for a program that fits is 6 to 21 % lower.
"""

from __future__ import annotations

import dataclasses
import itertools

from models.config import TransformerConfig
from models.loss.chunk_count import chunk_count
from models.remat_names import BLOCK_INPUT, MATMULS, widths
from pipeline.errors import InputError
from training.config import OptimizerConfig, Parallelism, TrainConfig
from training.cost.memory_estimate import GIB, Estimate, estimate
from training.cost.recompute import recomputed

SHARDINGS = {"replicated": 0.0, "zero1": 0.01, "fsdp": 0.1}
"""What each costs, as a share of the forward pass, for "auto": gathering parameters once a step is
next to nothing, gathering them layer by layer twice is worth a tenth of recomputation."""
LOGIT_BYTES = {"cpu": 2**24}
DEFAULT_LOGIT_BYTES = 2**29
OFFLOADED = f"offload:{BLOCK_INPUT}"
"""The setting of remat with the least memory: blocks are recomputed, and their inputs moved."""


def resolve(
    model: TransformerConfig,
    optimizer: OptimizerConfig,
    train: TrainConfig,
    devices: int,
    *,
    platform: str,
    limit: float | None,
    slices: int = 1,
) -> tuple[TrainConfig, str]:
    """`train` without "auto", and a sentence on why.

    Of the settings that are "auto" the cheapest combination is taken that fits, where recomputed
    FLOPs and a split state cost something. Where none fits, the optimizer state is moved to the
    host's memory, which happens once a step; then residuals, which are moved in every layer of
    every microbatch; then both. Where still none fits the smallest is taken, and the sentence says
    by how much it is too large.

    Args:
        model: the shape.
        optimizer: its state counts.
        train: what to resolve.
        devices: of the run.
        platform: "tpu", "gpu" or "cpu".
        limit: bytes of one device that a program may use, None when that is not known.
        slices: among which the devices are divided; no state is split over several.

    Raises:
        InputError: the mesh does not divide the devices, or the model not the mesh.
    """
    candidates = []
    for remat, sharding, place in itertools.product(
        _remats(model, train), _shardings(train), _places(train)
    ):
        parallel = dataclasses.replace(train.parallel, sharding=sharding, optimizer_memory=place)
        parallel = parallel.within_slices(devices, slices)
        if not _divides(model, parallel, devices):
            continue
        found = dataclasses.replace(train, remat=remat, parallel=parallel)
        found = dataclasses.replace(found, loss_chunks=_chunks(model, found, devices, platform))
        size = estimate(model, optimizer, found, devices, platform=platform)
        moved = (2 if remat == OFFLOADED else 0) + (place == "host")
        cost = recomputed(model, remat, train.sequence_length) + SHARDINGS[sharding]
        candidates.append(((moved, cost), size.total, found, size))
    if not candidates:
        chosen = train.parallel.sharding
        group = train.parallel.mesh_shape(devices // slices)[1]
        raise InputError(
            f"Parallelism: sharding {chosen!r} splits TransformerConfig.embed={model.embed} over "
            f"{group} devices, which do not divide it; choose a group that does"
        )
    fitting = [c for c in candidates if limit is None or c[1] <= limit]
    if fitting:
        _, _, found, size = min(fitting, key=lambda c: c[:2])
    else:
        _, _, found, size = min(candidates, key=lambda c: c[1])
    return found, _reason(found, size, limit, recomputed(model, found.remat, train.sequence_length))


def _remats(model: TransformerConfig, train: TrainConfig) -> list[str]:
    """Everything kept, every subset of the matmuls beside attention and the middle, nothing.

    And nothing with the blocks' inputs moved to the host.
    """
    if train.remat != "auto":
        return [train.remat]
    always = ("attention_residuals", "mlp_input")
    others = [name for name in MATMULS if name not in always and widths(model)[name]]
    subsets = itertools.chain.from_iterable(
        itertools.combinations(others, count) for count in range(1, len(others))
    )
    partial = ["save:" + ",".join((*always, *subset)) for subset in subsets]
    return [
        "matmuls",
        *partial,
        "save:" + ",".join(always),
        "save:attention_residuals",
        "full",
        OFFLOADED,
    ]


def _shardings(train: TrainConfig) -> tuple[str, ...]:
    chosen = train.parallel.sharding
    return tuple(SHARDINGS) if chosen == "auto" else (chosen,)


def _places(train: TrainConfig) -> tuple[str, ...]:
    chosen = train.parallel.optimizer_memory
    return ("device", "host") if chosen == "auto" else (chosen,)


def _divides(model: TransformerConfig, parallel: Parallelism, devices: int) -> bool:
    """Whether a split state is possible; other shardings are left to fail where they are made."""
    group = parallel.mesh_shape(devices)[1]
    return parallel.sharding == "replicated" or model.embed % group == 0


def _chunks(model: TransformerConfig, train: TrainConfig, devices: int, platform: str) -> int:
    if train.loss_chunks != "auto":
        return int(train.loss_chunks)
    data, group, sequence, tensor = train.parallel.mesh_shape(devices)
    return chunk_count(
        train.batch_size // train.microbatches,
        train.sequence_length // sequence,
        model.padded_vocab_size // tensor,
        shards=data * group,
        budget=LOGIT_BYTES.get(platform, DEFAULT_LOGIT_BYTES),
    )


def _reason(train: TrainConfig, size: Estimate, limit: float | None, again: float) -> str:
    repeats = f"repeats {again:.0%} of the blocks' forward FLOPs" if again else "no matmul twice"
    chosen = (
        f"remat {train.remat} ({repeats}), sharding {train.parallel.sharding}, "
        f"{train.loss_chunks} loss chunks"
    )
    if train.parallel.optimizer_memory == "host":
        chosen += ", optimizer state in the host's memory"
    if limit is None:
        return f"{chosen}: the memory of a device is not known"
    if size.total <= limit:
        return f"{chosen}: estimated {size} of {limit / GIB:.1f} GiB"
    return (
        f"{chosen}: estimated {size}, more than {limit / GIB:.1f} GiB; use more "
        "microbatches or devices"
    )
