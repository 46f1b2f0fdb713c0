"""How much memory a train step takes on one device, and the settings that make it fit.

The estimate is arithmetic on shapes, fitted to what libtpu's compiler says of the programs that
`training.step.program` builds: within 6 % of the eight of
tests/training/cost/test_memory_estimate.py that it is fitted to, within 8 % of nine others. The
compiler itself has the last word, see `training.preflight`. A device whose memory is not known is
taken to have enough.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass

from models.config import TransformerConfig
from models.loss.cross_entropy import chunk_count
from models.remat_names import PRODUCTS, saved_names, widths
from pipeline.errors import InputError
from training.config import OptimizerConfig, Parallelism, TrainConfig
from training.config.optimizer import state_bytes_per_parameter

GIB = 2**30
SHARDINGS = {"replicated": 0.0, "zero1": 0.01, "fsdp": 0.1}
"""What each costs, as a share of the forward pass, for "auto": gathering parameters once a step is
next to nothing, gathering them layer by layer twice is worth a tenth of recomputation."""
LOGIT_BYTES = {"cpu": 2**24}
DEFAULT_LOGIT_BYTES = 2**29
USABLE = 0.97
"""Part of the memory that an estimate may fill."""


@dataclass(frozen=True)
class Estimate:
    """Bytes on one device.

    Attributes:
        state: parameters, their average where there is one, and optimizer state.
        copies: the parameters in the compute dtype and gradients.
        saved: what the forward pass keeps for the backward pass, log-sum-exps included.
        working: intermediates of one layer's backward pass.
        logits: of one chunk, with their gradient.
    """

    state: float
    copies: float
    saved: float
    working: float
    logits: float

    @property
    def total(self) -> float:
        """The most there is at a moment: the loss is done when the layers' backward pass starts."""
        return self.state + self.copies + self.saved + max(self.working, self.logits)

    def __str__(self) -> str:
        parts = ", ".join(
            f"{field.name} {getattr(self, field.name) / GIB:.1f}"
            for field in dataclasses.fields(self)
        )
        return f"{self.total / GIB:.1f} GiB ({parts})"


def estimate(
    model: TransformerConfig, optimizer: OptimizerConfig, train: TrainConfig, devices: int
) -> Estimate:
    """Memory of one step with concrete settings.

    Raises:
        InputError: a setting is still "auto".
    """
    parallel = train.parallel
    if "auto" in (train.remat, train.loss_chunks, parallel.sharding):
        raise InputError(
            "estimate: expected concrete remat, loss_chunks and sharding, found "
            f"{train.remat!r}, {train.loss_chunks!r} and {parallel.sharding!r}; call resolve first"
        )
    data, group, sequence, tensor = parallel.mesh_shape(devices)
    parameters, tables = model.parameter_count / tensor, _table_parameters(model) / tensor
    width = 2 if train.compute_dtype == "bfloat16" else 4
    tokens = train.batch_size * train.sequence_length
    tokens /= data * group * sequence * train.microbatches
    average = 4 if train.ema else 0
    moments = state_bytes_per_parameter(optimizer) * (parameters - tables)
    moments += state_bytes_per_parameter(optimizer, block_matrix=False) * tables
    state = (parameters * (4 + average) + moments) / group
    return Estimate(
        state=state,
        copies=_copies(parameters, tables, width, group, parallel.sharding, train.microbatches),
        saved=tokens * _saved_per_token(model, train.remat, width, tensor),
        working=tokens * _working_per_token(model, train.remat, width, parallel),
        logits=tokens * model.vocab_size * (4 + width) / int(train.loss_chunks) / tensor,
    )


def _table_parameters(model: TransformerConfig) -> int:
    """Of the embedding and an untied head."""
    return model.vocab_size * model.embed * (1 if model.tied else 2)


def _copies(
    parameters: float, tables: float, width: int, group: int, sharding: str, microbatches: int
) -> float:
    """A gathered copy, gradients in the compute dtype and in float32, and the update's own.

    With "fsdp" the tables alone are gathered whole.
    """
    blocks = parameters - tables
    gathered = width * (tables + blocks / group if sharding == "fsdp" else parameters)
    gradients = parameters * (width + 8) / group
    return gathered + gradients + (parameters * 4 / group if microbatches > 1 else 0)


_STREAMS = ("attention_input", "attention_output", "mlp_input")  # [embed], whole under "tensor"


def _saved_per_token(model: TransformerConfig, remat: str, width: int, tensor: int) -> float:
    """Bytes kept of one token over all layers: what "tensor" divides, and the residual streams."""
    size = widths(model)
    streams, divided = model.embed * width, 0.0
    if remat in ("none", "dots"):  # float32 copies of norms and activations come on top
        names = PRODUCTS
        if remat == "none":
            streams, divided = streams + 40 * model.embed, 8.0 * model.mlp
    else:
        names = saved_names(remat)[0]
    streams += width * sum(size[name] for name in names if name in _STREAMS)
    divided += width * sum(size[name] for name in names if name not in _STREAMS)
    divided += 4 * model.heads if "attention_residuals" in names else 0
    return model.layers * (streams + divided / tensor)


def _working_per_token(
    model: TransformerConfig, remat: str, width: int, parallel: Parallelism
) -> float:
    """Bytes of one token in one layer's backward pass.

    Queries, keys, values, output and their cotangents, the MLP's activations and cotangents, two
    residual streams, and the kernel's log-sum-exp, which fills 128 lanes. Where a row is divided,
    every device has keys, values and their cotangents of all of it.
    """
    heads = model.heads * model.head_size
    gathered = 4 * model.kv_heads * model.head_size * (parallel.sequence - 1)
    wide = (5 if remat in ("none", "dots", "products") else 7) * model.mlp
    divided = width * (8 * heads + wide + gathered) + 4 * 128 * model.heads
    return divided / parallel.tensor + width * 2 * model.embed


def resolve(
    model: TransformerConfig,
    optimizer: OptimizerConfig,
    train: TrainConfig,
    devices: int,
    *,
    platform: str,
    limit: float | None,
) -> tuple[TrainConfig, str]:
    """`train` without "auto", and a sentence on why.

    Of the settings that are "auto" the cheapest combination is taken that fits, where recomputed
    FLOPs and a split state cost something. Where none fits the smallest is taken, and the sentence
    says by how much it is too large.

    Args:
        model: the shape.
        optimizer: its state counts.
        train: what to resolve.
        devices: of the run.
        platform: "tpu", "gpu" or "cpu".
        limit: bytes of one device that a program may use, None when that is not known.

    Raises:
        InputError: the mesh does not divide the devices, or the model not the mesh.
    """
    candidates = []
    for remat, sharding in itertools.product(_remats(model, train), _shardings(train)):
        parallel = dataclasses.replace(train.parallel, sharding=sharding)
        if not _divides(model, parallel, devices):
            continue
        found = dataclasses.replace(train, remat=remat, parallel=parallel)
        found = dataclasses.replace(found, loss_chunks=_chunks(model, found, devices, platform))
        size = estimate(model, optimizer, found, devices)
        cost = recomputed(model, remat, train.sequence_length) + SHARDINGS[sharding]
        candidates.append((cost, size.total, found, size))
    if not candidates:
        chosen, group = train.parallel.sharding, train.parallel.mesh_shape(devices)[1]
        raise InputError(
            f"Parallelism: sharding {chosen!r} splits TransformerConfig.embed={model.embed} over "
            f"{group} devices, which do not divide it; choose a group that does"
        )
    fitting = [c for c in candidates if limit is None or c[1] <= USABLE * limit]
    if fitting:
        _, _, found, size = min(fitting, key=lambda c: c[:2])
    else:
        _, _, found, size = min(candidates, key=lambda c: c[1])
    return found, _reason(found, size, limit, recomputed(model, found.remat, train.sequence_length))


def recomputed(model: TransformerConfig, remat: str, sequence_length: int) -> float:
    """Share of the blocks' forward FLOPs that the backward pass repeats, causal attention counted.

    A product is repeated when its result is not kept; attention also needs queries, keys and
    values, which are there or repeated too. Nothing is repeated where only norms and activations
    are.
    """
    flops = _flops(model, sequence_length)
    kept = PRODUCTS if remat in ("none", "dots") else sum(saved_names(remat), ())
    again = sum(flops[name] for name in flops if name not in kept)
    if remat == "dots":
        again += flops["attention_residuals"]
    return again / (sum(flops.values()) + 2 * model.embed * model.mlp)


def _flops(model: TransformerConfig, sequence_length: int) -> dict[str, float]:
    """Forward FLOPs of a token and layer behind each kept name; the down projection has none."""
    size, attended = widths(model), (sequence_length + 1) / 2
    into = {name: 2 * model.embed * size[name] for name in ("queries", "keys", "values")}
    into |= {name: 2 * model.embed * size[name] for name in ("gate", "up") if size[name]}
    return into | {
        "attention_residuals": 4 * size["queries"] * attended,
        "mlp_input": 2 * size["queries"] * model.embed,
    }


def _remats(model: TransformerConfig, train: TrainConfig) -> list[str]:
    """Everything kept, every subset of the products beside attention and the middle, nothing."""
    if train.remat != "auto":
        return [train.remat]
    always = ("attention_residuals", "mlp_input")
    others = [name for name in PRODUCTS if name not in always and widths(model)[name]]
    subsets = itertools.chain.from_iterable(
        itertools.combinations(others, count) for count in range(1, len(others))
    )
    partial = ["save:" + ",".join((*always, *subset)) for subset in subsets]
    return ["products", *partial, "save:" + ",".join(always), "save:attention_residuals", "full"]


def _shardings(train: TrainConfig) -> tuple[str, ...]:
    chosen = train.parallel.sharding
    return tuple(SHARDINGS) if chosen == "auto" else (chosen,)


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
        model.vocab_size // tensor,
        shards=data * group,
        budget=LOGIT_BYTES.get(platform, DEFAULT_LOGIT_BYTES),
    )


def _reason(train: TrainConfig, size: Estimate, limit: float | None, again: float) -> str:
    repeats = f"repeats {again:.0%} of the blocks' forward FLOPs" if again else "no product twice"
    chosen = (
        f"remat {train.remat} ({repeats}), sharding {train.parallel.sharding}, "
        f"{train.loss_chunks} loss chunks"
    )
    if limit is None:
        return f"{chosen}: the memory of a device is not known"
    if size.total <= USABLE * limit:
        return f"{chosen}: estimated {size} of {limit / GIB:.1f} GiB"
    return (
        f"{chosen}: estimated {size}, more than {USABLE:.0%} of {limit / GIB:.1f} GiB; use more "
        "microbatches or devices"
    )
