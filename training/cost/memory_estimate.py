"""How much memory a train step takes on one device, as a table of what it holds.

The estimate is arithmetic on shapes, fitted to what libtpu's compiler says of the programs that
`training.step.program` builds; tests/training/cost/test_memory_estimate.py has how near it is. The
compiler itself has the last word, see `training.preflight`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from models.attention.position_sharing import Way, choose_way
from models.attention.tile_choice import LANES, choose_tiles, partial_sums_bytes
from models.config import TransformerConfig
from models.remat_names import BLOCK_INPUT, MATMULS, saved_names, widths
from pipeline.errors import InputError
from training.config import OptimizerConfig, Parallelism, TrainConfig
from training.config.optimizer import state_bytes_per_parameter

GIB = 2**30

BROUGHT = 1.25
"""Moments on the device while they are updated, in units of all that come from the host: libtpu
brings all, and keeps the new values of two arrays of eight beside them until they have gone."""

Parts = Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Bytes on one device, by what they hold; `backward`, `loss` and `update` are not simultaneous.

    Attributes:
        state: what is there all the time: parameters, their average, optimizer state, the
            parameters in the compute dtype, gradients.
        residuals: what the forward pass keeps for the backward pass, by the names of
            `models.remat_names`.
        backward: intermediates of one layer's backward pass.
        loss: of one chunk.
        update: optimizer state that comes from the host when the residuals are gone, and goes
            back.
        host: what lies in the host's memory, on no device.
    """

    state: Parts
    residuals: Parts
    backward: Parts
    loss: Parts
    update: Parts = field(default_factory=dict)
    host: Parts = field(default_factory=dict)

    @property
    def parts(self) -> dict[str, float]:
        """Bytes by name at the moment when there are most of them; they add up to `total`."""
        backward = {**self.residuals, **self.backward}
        moments = (backward, {**self.residuals, **self.loss}, self.update)
        fullest = max(moments, key=lambda parts: sum(parts.values()))
        return {name: size for name, size in {**self.state, **fullest}.items() if size}

    @property
    def total(self) -> float:
        """The most there is at a moment."""
        return sum(self.parts.values())

    def __str__(self) -> str:
        away = sum(self.host.values())
        return f"{self.total / GIB:.1f} GiB" + (
            f" and {away / GIB:.1f} of the host" if away else ""
        )

    def table(self) -> str:
        """A line a part in GiB, their sum, and what lies in the host's memory."""
        rows = [*self.parts.items(), ("sum", self.total)]
        rows += [(f"host: {name}", size) for name, size in self.host.items() if size]
        return "\n".join(f"{name:<36}{size / GIB:>9.3f} GiB" for name, size in rows)


def estimate(
    model: TransformerConfig,
    optimizer: OptimizerConfig,
    train: TrainConfig,
    devices: int,
    *,
    platform: str = "tpu",
) -> Estimate:
    """Memory of one step with concrete settings.

    Args:
        model: the shape.
        optimizer: its state counts.
        train: what is computed, with nothing "auto".
        devices: of the run.
        platform: "tpu", "gpu" or "cpu"; the splash kernel runs on the first alone.

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
    width = 2 if train.compute_dtype == "bfloat16" else 4
    rows = train.batch_size / (data * group * train.microbatches)
    tokens = rows * train.sequence_length / sequence
    moments = _moments(model, optimizer) / tensor / group
    on_host = parallel.optimizer_memory == "host"
    residuals, offloaded = _residuals(model, train.remat, width, tensor)
    sums = _partial_sums(model, train, rows, platform)
    chunk = tokens * model.padded_vocab_size / int(train.loss_chunks) / tensor
    return Estimate(
        state={
            **_parameters(model, train, width, group, tensor),
            "optimizer state": 0.0 if on_host else moments,
        },
        residuals=_times(tokens * model.layers, residuals),
        backward={
            **_times(tokens, _working(model, train.remat, width, parallel)),
            "partial sums of attention's backward": sums,
        },
        loss={"logits of a chunk": 4 * chunk, "their gradient": width * chunk},
        update={"optimizer state, from and to the host": BROUGHT * moments} if on_host else {},
        host={
            "optimizer state": moments if on_host else 0.0,
            **_times(tokens * model.layers * train.microbatches, offloaded),
        },
    )


def _times(count: float, parts: Parts) -> dict[str, float]:
    return {name: count * size for name, size in parts.items()}


def _moments(model: TransformerConfig, optimizer: OptimizerConfig) -> float:
    """Bytes of optimizer state; Muon's of tables has two moments, of block matrices one."""
    tables = _table_parameters(model)
    return (
        state_bytes_per_parameter(optimizer) * (model.parameter_count - tables)
        + state_bytes_per_parameter(optimizer, block_matrix=False) * tables
    )


def _parameters(
    model: TransformerConfig, train: TrainConfig, width: int, group: int, tensor: int
) -> dict[str, float]:
    """Parameters and what is shaped like them: copies in the compute dtype, and gradients.

    With "fsdp" only embedding and head are gathered whole. Gradients are there in the compute
    dtype and in float32, and so is the update.
    """
    parameters, tables = model.parameter_count / tensor, _table_parameters(model) / tensor
    layers = parameters - tables
    gathered = layers / group if train.parallel.sharding == "fsdp" else layers
    stays = train.parallel.rules.splits_tables and tensor == 1
    return {
        "parameters": parameters * 4 / group,
        "average of parameters": parameters * 4 / group if train.ema else 0.0,
        "compute copy of layers": width * gathered,
        "compute copy of embedding and head": width * tables / (group if stays else 1),
        "gradients and update": parameters * (width + 8) / group,
        "accumulated gradients": parameters * 4 / group if train.microbatches > 1 else 0.0,
    }


def _table_parameters(model: TransformerConfig) -> int:
    """Of the embedding and an untied head."""
    return model.padded_vocab_size * model.embed * (1 if model.tied else 2)


_STREAMS = (BLOCK_INPUT, "attention_input", "attention_output", "mlp_input")
"""Names with an axis [embed], which is whole under "tensor"."""


def _residuals(
    model: TransformerConfig, remat: str, width: int, tensor: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Bytes of a token and layer by name: on the device, and moved to the host."""
    size = {name: width * count for name, count in widths(model).items()}
    size = {name: n if name in _STREAMS else n / tensor for name, n in size.items()}
    if remat in ("none", "dots"):
        saved, offloaded = MATMULS, ()
    else:
        saved, offloaded = saved_names(remat)
    # A block's input is kept whatever the policy, unless it is moved.
    names = [name for name in (BLOCK_INPUT, *saved) if name not in offloaded]
    kept = {name: size[name] for name in dict.fromkeys(names)}
    if "attention_residuals" in kept and remat not in ("none", "dots"):
        kept["log-sum-exp"] = 4 * model.heads / tensor
    if remat == "none":
        kept["float32 copies of norms and activations"] = 40 * model.embed + 8 * model.mlp / tensor
    return kept, {name: size[name] for name in offloaded}


def _working(
    model: TransformerConfig, remat: str, width: int, parallel: Parallelism
) -> dict[str, float]:
    """Bytes of a token in one layer's backward pass.

    The kernel's log-sum-exp fills 128 lanes. Where a row is divided and its devices do not exchange
    positions for heads, every device has keys, values and their cotangents of all of it.
    """
    heads = model.heads * model.head_size / parallel.tensor
    gathered = 4 * model.kv_heads * model.head_size * (parallel.sequence - 1) / parallel.tensor
    if _way(model, parallel) == "heads":
        gathered = 0.0
    wide = 5 if remat in ("none", "dots") or _keeps_mlp(model, remat) else 7
    return {
        "attention, with cotangents": width * 8 * heads,
        "keys and values of other devices": width * gathered,
        "log-sum-exp in lanes": 4 * LANES * model.heads / parallel.tensor,
        "MLP, with cotangents": width * wide * model.mlp / parallel.tensor,
        "two residual streams": width * 2 * model.embed,
    }


def _way(model: TransformerConfig, parallel: Parallelism) -> Way:
    """How devices that share a row divide attention, where its length is a multiple of enough."""
    return choose_way(model.kv_heads // parallel.tensor, True, None, parallel.sequence)


def _keeps_mlp(model: TransformerConfig, remat: str) -> bool:
    """Whether nothing of the MLP's matmuls is made again."""
    known = sum(saved_names(remat), ())
    return all(name in known for name in ("gate", "up") if widths(model)[name])


def _partial_sums(
    model: TransformerConfig, train: TrainConfig, rows: float, platform: str
) -> float:
    """Bytes that splash's fused backward kernel writes in one layer; 0 where it does not run."""
    sequence, length = train.parallel.sequence, train.sequence_length
    runs = platform == "tpu" and train.attention in ("auto", "splash")
    if not runs or length % (LANES * sequence):
        return 0.0
    heads = math.ceil(rows * model.heads / train.parallel.tensor)
    window = None if None in model.windows else max(filter(None, model.windows))
    if _way(model, train.parallel) == "heads":
        heads, sequence = math.ceil(heads / sequence), 1
    sizes = choose_tiles(length, model.head_size, window, sequence, heads)
    if not sizes.use_fused_bwd_kernel:
        return 0.0
    block = sizes.block_kv_dkv
    return heads * partial_sums_bytes(length, model.head_size, sequence, block)
