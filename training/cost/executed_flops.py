"""FLOPs that a train step executes: those of the model, what is repeated, and the optimizer's.

Counted are matmuls, as in MFU; a matmul of [m, k] by [k, n] is 2 m k n. The backward pass repeats a
matmul whose result `remat` does not keep. Attention kernels make 2 matmuls forward and 5 backward
over the pairs that the mask lets through, as they recompute the scores (7 with splash attention's
two separate kernels, and with Triton's, which recomputes them twice); the reference makes 2 and 6
over all pairs. Imports no JAX.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from models.shape.config import TransformerConfig
from models.shape.footprint import attended_pairs, footprint
from models.shape.remat_names import MATMULS, saved_names
from training.config.optimizer import OptimizerConfig
from training.config.train import TrainConfig
from training.cost.attention import partial_sums
from training.cost.memory_estimate import own_matrices

ATTENTION = "attention_residuals"


def forward_flops(model: TransformerConfig, sequence_length: int) -> dict[str, float]:
    """Forward FLOPs per token of the computation of each name, the mean over the layers."""
    shape = footprint(model)
    found: dict[str, float] = {m.result: 2 * m.rows * m.columns for m in shape.matrices}
    attended = shape.pairs(sequence_length) / (sequence_length * model.layers)
    return found | {ATTENTION: 4 * shape.widths["queries"] * attended}


def block_flops(model: TransformerConfig, sequence_length: int) -> float:
    """Forward FLOPs per token of one block's matmuls and causal attention, the mean over layers."""
    return sum(forward_flops(model, sequence_length).values())


def repeated(model: TransformerConfig, remat: str) -> tuple[str, ...]:
    """Names whose matmul or attention the backward pass repeats; attention last.

    Repeated attention also needs queries, keys and values, which are kept or repeated too.
    """
    kept = MATMULS if remat in ("none", "dots") else sum(saved_names(remat), ())
    names = [m.result for m in footprint(model).matrices if m.result]
    again = [name for name in (*names, ATTENTION) if name not in kept]
    return tuple(again) if remat != "dots" else (*again, ATTENTION)


def recomputed(model: TransformerConfig, remat: str, sequence_length: int) -> float:
    """Share of the blocks' forward FLOPs that the backward pass repeats, with causal attention."""
    flops = forward_flops(model, sequence_length)
    return sum(flops[name] for name in repeated(model, remat)) / sum(flops.values())


def orthogonalization_flops(
    model: TransformerConfig, optimizer: OptimizerConfig, devices: int
) -> float:
    """FLOPs of Muon's iterations on one of `devices` that share the matrices; 0 for others.

    An iteration of a matrix of sides m <= n makes three products, 2 m^2 n + 2 m^3 + 2 m^2 n FLOPs
    (https://kellerjordan.github.io/posts/muon).
    """
    own = own_matrices(model, optimizer, devices)
    flops = sum(count * (4.0 * m * m * n + 2.0 * m**3) for (m, n), count in own.items())
    return optimizer.muon_steps * flops


def executed_flops(
    model: TransformerConfig,
    optimizer: OptimizerConfig,
    train: TrainConfig,
    backend: str,
    devices: int,
) -> float | None:
    """FLOPs of one step over all devices; None for attention that cannot be counted.

    `train` is without "auto". "blockwise" skips tiles that depend on the compiler.
    """
    if backend == "blockwise":
        return None
    shape, length = footprint(model), train.sequence_length
    again = repeated(model, train.remat)
    twice = [each.rows * each.columns for each in shape.matrices if each.result in again]
    weights = 6 * model.matmul_parameters + 2 * model.layers * sum(twice)
    with_splash = replace(train, attention="splash")
    pairs = 0  # of a token and a position, over all layers and matmuls of attention
    for window, layers in Counter(shape.windows).items():
        if backend == "reference":
            matmuls, visible = 8, length**2
        else:
            fused = backend in ("cudnn", "ponente") or (
                backend == "splash" and partial_sums(model, with_splash, devices, window) > 0
            )
            matmuls, visible = 7 if fused else 9, attended_pairs(length, window)
        pairs += layers * visible * (matmuls + 2 * (ATTENTION in again))
    attention = 2 * shape.widths["queries"] * pairs / length
    _, group, _, tensor = train.parallel.mesh_shape(devices)
    update = devices * orthogonalization_flops(model, optimizer, group * tensor)
    return train.batch_size * length * (weights + attention) + update
