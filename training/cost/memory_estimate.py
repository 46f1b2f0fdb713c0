"""Estimates the memory of a train step on one device, as a table of its contents.

Arithmetic on shapes, fitted to the memory that libtpu's compiler reports for the programs of
`training.step.program`; tests/training/cost/test_memory_estimate.py has its error. The compiler's
own figure is authoritative, see `training.preflight`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from models.shape.config import TransformerConfig
from models.shape.footprint import Footprint, footprint
from models.shape.remat_names import BLOCK_INPUT, MATMULS, saved_names
from models.shape.splash_tiles import LANES
from pipeline.errors import InputError
from training.config import OptimizerConfig, Parallelism, TrainConfig
from training.config.optimizer import Role
from training.config.parallelism import MESH_AXES, Rules
from training.cost.attention import exchanges_heads, partial_sums

GIB = 2**30

BROUGHT = 1.25
"""Peak device memory of offloaded moments during the update, in units of their size: libtpu brings
all of them, plus the new values of two arrays of eight that are still on the way to the host."""

Parts = Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Bytes on one device, by content; `backward`, `loss` and `update` are not simultaneous.

    Attributes:
        state: in memory during the whole step.
        residuals: what the forward pass keeps for the backward pass, by the names of
            `models.shape.remat_names`.
        backward: intermediates of one iteration of the backward pass over layers.
        loss: logits of one chunk and their gradient.
        update: after the residuals are freed: optimizer state that comes from the host, and what
            Muon needs beyond what the update has freed.
    """

    state: Parts
    residuals: Parts
    backward: Parts
    loss: Parts
    update: Parts = field(default_factory=dict)
    host: Parts = field(default_factory=dict)

    @property
    def parts(self) -> dict[str, float]:
        """Bytes by name at the peak; they add up to `total`."""
        backward = {**self.residuals, **self.backward}
        phases = (backward, {**self.residuals, **self.loss}, self.update)
        peak = max(phases, key=lambda parts: sum(parts.values()))
        return {name: size for name, size in {**self.state, **peak}.items() if size}

    @property
    def activations(self) -> float:
        """Bytes at the peak besides the state."""
        return self.total - sum(self.state.values())

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    def __str__(self) -> str:
        host = sum(self.host.values())
        beside = f" and {host / GIB:.1f} of the host" if host else ""
        return f"{self.total / GIB:.1f} GiB{beside}"

    def table(self) -> str:
        rows = [*self.parts.items(), ("sum", self.total)]
        rows += [(f"host: {name}", size) for name, size in self.host.items() if size]
        return "\n".join(f"{name:<44}{size / GIB:>9.3f} GiB" for name, size in rows)


def estimate(
    model: TransformerConfig,
    optimizer: OptimizerConfig,
    train: TrainConfig,
    devices: int,
    *,
    platform: str = "tpu",
    chip: str = "",
) -> Estimate:
    """Memory of one step on one of `devices` devices of a platform: "tpu", "gpu" or "cpu"."""
    parallel, shape = train.parallel, footprint(model)
    if "auto" in (train.remat, train.loss_chunks, parallel.sharding):
        raise InputError(
            "estimate: expected concrete remat, loss_chunks and sharding, found "
            f"{train.remat!r}, {train.loss_chunks!r} and {parallel.sharding!r}; call resolve first"
        )
    mesh = parallel.mesh_shape(devices)
    data, group, sequence, tensor = mesh
    width = 2 if train.compute_dtype == "bfloat16" else 4
    tokens = train.batch_size / (data * group * train.microbatches) * train.sequence_length
    tokens = tokens / sequence
    rules = parallel.rules.optimizer_state
    rules = parallel.rules.params if rules is None else rules
    moments = optimizer_bytes(model, optimizer) / _parts(rules, mesh)
    on_host = parallel.optimizer_memory == "host"
    held = _parameters(shape, train, width, mesh)
    # The update no longer needs the model in the compute dtype, nor all of what it is counted with.
    freed = sum(size for name, size in held.items() if name.startswith("compute"))
    freed += held["gradients and update"] * (width + 4) / (width + 8)
    residuals, offloaded = _residuals(model, train.remat, width, tensor)
    once = _times(tokens, _once(model, width, tensor))
    # The backward pass needs the residuals of a whole iteration of the loop over layers beside the
    # arrays of all layers; for one layer, `_working` includes them.
    others = shape.period * min(train.unroll, shape.cycles) - 1 if shape.cycles > 1 else 0
    window = None if None in model.windows else max(filter(None, model.windows))
    chunk = tokens * model.padded_vocab_size / int(train.loss_chunks) / tensor
    return Estimate(
        state={**held, "optimizer state": 0.0 if on_host else moments},
        residuals={**_times(tokens * model.layers, residuals), **once},
        backward={
            **_times(tokens, _working(model, train.remat, width, parallel)),
            "residuals of the loop's other layers": tokens * others * sum(residuals.values()),
            "partial sums of attention's backward": partial_sums(
                model, train, devices, window, platform, chip
            ),
            # Fitted to one program: 5.3 GiB more with rows than without; 3.9 without copies.
            "cotangents of what layers share, and copies": 3 * sum(once.values()),
        },
        loss={"logits of a chunk": 4 * chunk, "their gradient": width * chunk},
        update={
            "optimizer state, from and to the host": BROUGHT * moments if on_host else 0.0,
            "matrices of Muon": max(0.0, _stack(model, optimizer, width, group * tensor) - freed),
        },
        host={
            "optimizer state": moments if on_host else 0.0,
            **_times(tokens * model.layers * train.microbatches, offloaded),
        },
    )


def _times(count: float, parts: Parts) -> dict[str, float]:
    return {name: count * size for name, size in parts.items()}


MOMENT_BYTES = {"float32": 4, "bfloat16": 2}
MOMENTS = {"adamw": 2, "muon": 1, "lion": 1}


def optimizer_bytes(model: TransformerConfig, optimizer: OptimizerConfig) -> float:
    """Bytes of the optimizer's moments of all parameters, without a few scalars.

    NorMuon has a number besides for each row of the blocks' matrices along their longer sides.
    """
    shape, table = footprint(model), model.padded_vocab_size * model.embed
    sizes: dict[Role, int] = {
        "matrices": shape.block_parameters,
        "embedding": table + (model.context or 0) * model.embed,
        "head": 0 if model.tied else table,
        "value_embedding": model.value_parameters[0],
        "residual_scale": model.layers if model.residual_scale else 0,
        "input_scale": model.layers if model.input_scale else 0,
    }
    sizes["vectors"] = shape.parameters - sum(sizes.values())
    count = sum(MOMENTS[str(optimizer.group(role).kind)] * size for role, size in sizes.items())
    if optimizer.group("matrices").kind == "muon" and optimizer.muon_row_beta is not None:
        count += model.layers * sum(max(each.rows, each.columns) for each in shape.matrices)
    return float(MOMENT_BYTES[optimizer.moment_dtype] * count)


def own_matrices(
    model: TransformerConfig, optimizer: OptimizerConfig, devices: int
) -> dict[tuple[int, int], int]:
    """Matrices of sides m <= n that Muon iterates on one of `devices` that share them.

    See `training.sharding.newton_schulz`; empty for other optimizers.
    """
    if optimizer.group("matrices").kind != "muon":
        return {}
    sides = [(each.rows, each.columns) for each in footprint(model).matrices]
    shapes = Counter((min(pair), max(pair)) for pair in sides)
    return {shape: math.ceil(count * model.layers / devices) for shape, count in shapes.items()}


def _stack(model: TransformerConfig, optimizer: OptimizerConfig, width: int, devices: int) -> float:
    """Bytes of Muon's largest stack before and after it, and of the products of one matrix."""
    own = own_matrices(model, optimizer, devices).items()
    sizes = [2 * width * k * m * n + 4 * m * n + (2 * width + 4) * m * m for (m, n), k in own]
    return float(max(sizes, default=0))


def _parts(rules: Rules, mesh: tuple[int, ...]) -> int:
    """Devices among which rules split an array: along the mesh axes that they name."""
    named = {axis for _, axes in rules for axis in axes}
    return math.prod(size for axis, size in zip(MESH_AXES, mesh, strict=True) if axis in named)


def _parameters(
    shape: Footprint, train: TrainConfig, width: int, mesh: tuple[int, int, int, int]
) -> dict[str, float]:
    """Bytes of the parameters, of their copies in the compute dtype and of the gradients.

    With "fsdp" only tables and the head are gathered as a whole. Gradients and update take width +
    4 + 4 bytes per parameter. The loop over microbatches needs the gathered parameters once more,
    and whole gradients where they are reduced once a step.
    """
    _, group, _, tensor = mesh
    tables = shape.table_parameters / tensor
    layers = shape.parameters / tensor - tables
    own = shape.parameters / _parts(train.parallel.rules.params, mesh)
    gathered = layers / group if train.parallel.sharding == "fsdp" else layers
    stays = train.parallel.rules.splits_tables and tensor == 1
    copies = {
        "compute parameters of layers": width * gathered,
        "compute parameters of embedding and head": width * tables / (group if stays else 1),
    }
    loops = train.microbatches > 1
    summed = shape.parameters / tensor if train.parallel.reduce == "step" else own
    return {
        "parameters": own * 4,
        "average of parameters": own * 4 if train.ema or train.average_last else 0.0,
        **copies,
        "compute parameters of microbatches": sum(copies.values()) if loops and group > 1 else 0.0,
        "gradients and update": own * (width + 8),
        "accumulated gradients": summed * 4 if loops else 0.0,
    }


_STREAMS = (BLOCK_INPUT, "attention_input", "attention_output", "mlp_input")
"""Names with the axis [embed], which tensor parallelism does not split."""


def _residuals(
    model: TransformerConfig, remat: str, width: int, tensor: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Bytes per token and layer by name: kept on the device, and offloaded to the host."""
    size = {name: width * count for name, count in footprint(model).widths.items()}
    size = {name: n if name in _STREAMS else n / tensor for name, n in size.items()}
    if remat in ("none", "dots"):
        saved, offloaded = MATMULS, ()
    else:
        saved, offloaded = saved_names(remat)
    # Every policy keeps a block's input, unless it is offloaded.
    names = [name for name in (BLOCK_INPUT, *saved) if name not in offloaded]
    kept = {name: size[name] for name in dict.fromkeys(names)}
    if "attention_residuals" in kept and remat not in ("none", "dots"):
        kept["log-sum-exp"] = 4 * model.heads / tensor
    if remat == "none":
        streams = (40 if model.residual_scale is None else 44) * model.embed
        kept["float32 copies of norms and activations"] = streams + 8 * model.mlp / tensor
    return kept, {name: size[name] for name in offloaded}


def _once(model: TransformerConfig, width: int, tensor: int) -> dict[str, float]:
    """Bytes per token of what the loop over layers reads beside parameters, for all layers."""
    rows = sum(model.value_layers) * model.kv_heads * model.head_size
    return {
        "first block's input": float(width * model.embed) if model.input_scale else 0.0,
        "rows of value embeddings": width * rows / tensor,
    }


def _working(
    model: TransformerConfig, remat: str, width: int, parallel: Parallelism
) -> dict[str, float]:
    """Bytes per token of one layer's backward pass.

    The kernel's log-sum-exp fills 128 lanes. Devices that share a sequence and do not exchange its
    positions for heads hold the keys, values and cotangents of the whole sequence.
    """
    heads = model.heads * model.head_size / parallel.tensor
    gathered = 4 * model.kv_heads * model.head_size * (parallel.sequence - 1) / parallel.tensor
    if exchanges_heads(model, parallel):
        gathered = 0.0
    # Arrays of width `mlp` that are in memory at once: more when gate and up are recomputed.
    wanted = {"gate", "up"} if model.mlp_kind == "swiglu" else {"up"}
    keeps = remat in ("none", "dots") or wanted <= {*sum(saved_names(remat), ())}
    wide = (5 if keeps else 7) if "gate" in wanted else (3 if keeps else 4)
    return {
        "attention, with cotangents": width * 8 * heads,
        "keys and values of other devices": width * gathered,
        "log-sum-exp in lanes": 4 * LANES * model.heads / parallel.tensor,
        "MLP, with cotangents": width * wide * model.mlp / parallel.tensor,
        "two residual streams": width * 2 * model.embed,
    }
