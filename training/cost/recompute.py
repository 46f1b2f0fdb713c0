"""The matmuls that the backward pass recomputes with each `remat` setting; imports no JAX."""

from __future__ import annotations

import math

from models.config import TransformerConfig
from models.flops import attended_pairs
from models.remat_names import MATMULS, saved_names, widths


def recomputed(model: TransformerConfig, remat: str, sequence_length: int) -> float:
    """Share of the blocks' forward FLOPs that the backward pass repeats, with causal attention.

    A matmul is repeated when its result is not kept; repeated attention also needs queries, keys
    and values, which are kept or repeated too. Recomputed norms and activations count 0.
    """
    flops = forward_flops(model, sequence_length)
    again = sum(flops[name] for name in repeated(model, remat))
    return again / block_flops(model, sequence_length)


def block_flops(model: TransformerConfig, sequence_length: int) -> float:
    """Forward FLOPs per token of one block's matmuls and causal attention, the mean over layers."""
    return sum(forward_flops(model, sequence_length).values()) + 2 * model.embed * model.mlp


def repeated(model: TransformerConfig, remat: str) -> tuple[str, ...]:
    """Names whose matmul or attention the backward pass recomputes."""
    kept = MATMULS if remat in ("none", "dots") else sum(saved_names(remat), ())
    again = [name for name in forward_flops(model, 1) if name not in kept]
    return tuple(again) if remat != "dots" else (*again, "attention_residuals")


def forward_flops(model: TransformerConfig, sequence_length: int) -> dict[str, float]:
    """Forward FLOPs per token of the computation of each name, the mean over the layers.

    The MLP's down projection has no name: no gradient needs its result, so it is never recomputed.
    """
    size = widths(model)
    pairs = math.fsum(attended_pairs(sequence_length, window) for window in model.windows)
    attended = pairs / (sequence_length * model.layers)
    into = {name: 2 * model.embed * size[name] for name in ("queries", "keys", "values")}
    into |= {name: 2 * model.embed * size[name] for name in ("gate", "up") if size[name]}
    return into | {
        "attention_residuals": 4 * size["queries"] * attended,
        "mlp_input": 2 * size["queries"] * model.embed,
    }
