"""Counts the FLOPs that a train step executes, the numerator of HFU.

    executed = sum over matmuls, times their repetitions by loops and recomputation, of
                   2 x (elements of the result) x (length of the contracted axes)
             + sum over fused attention kernels of (matmuls of the kernel) x
                   2 x batch x heads x head_size x pairs that the mask lets through

The count is of the traced program after dead-code elimination. It includes the second forward pass
of `jax.checkpoint`, and attention scores above the diagonal where a back end computes them. The
compiler may merge equal matmuls (2 % of a small model's FLOPs with full recomputation, none
without). Attention kernels make 2 matmuls forward and 5 backward, as they recompute the scores (7
with splash attention's two separate kernels); a tile that the mask hides in part counts only its
visible pairs. Elementwise work does not count, as in MFU.

A program with parts that cannot be counted (a loop of unknown length, an unknown kernel) has no
count rather than a wrong one.
"""

from __future__ import annotations

import math
from typing import Any

from models.config import TransformerConfig
from models.flops import attended_pairs
from training.cost.jaxpr_cost import (
    Visit,
    called,
    live_equations,
    pair_flops,
    phase,
    traced_cost,
)

CUDNN = {"dot_product_attention_fwd_wrapper": 2, "dot_product_attention_bwd_wrapper": 5}
_MULTIPLIES = ("dot_general", "pallas_call", "conv_general_dilated", "ragged_dot_general")


def executed_flops(
    closed: Any, model: TransformerConfig, sequence_length: int, devices: int
) -> tuple[float | None, str]:
    """FLOPs of one step over all devices together, or None; and a sentence about the count.

    Args:
        closed: closed jaxpr of the step, traced for all devices.
        model: its windows limit the pairs that kernels compute.
        sequence_length: tokens per sequence.
        devices: number of devices that share the step.
    """
    found = [_special(visit) for visit in live_equations(closed, devices)]
    unknown = sorted({reason for _, reason in found if reason})
    if unknown:
        return None, f"HFU is not shown: {'; '.join(unknown)}"
    cost = traced_cost(closed, devices)
    kernels = cost.attention_flops + sum(flops for flops, _ in found)
    total = devices * (cost.matmul_flops + kernels * window_share(model, sequence_length))
    again = devices * cost.recomputed_flops / total if total else 0.0
    return total, f"a step executes {total:.3g} FLOPs, {again:.0%} of them a second time"


def window_share(model: TransformerConfig, length: int) -> float:
    """Visible pairs with windows / pairs of a causal mask, the mean over all layers."""
    whole = attended_pairs(length)
    return math.fsum(attended_pairs(length, w) / whole for w in model.windows) / len(model.windows)


def _special(visit: Visit) -> tuple[float, str]:
    """(FLOPs on one device, "") of cuDNN's kernels; (0, reason) of parts that cannot be counted."""
    equation, kind = visit.equation, visit.equation.primitive.name
    if kind in CUDNN:
        batch, position, heads, head_size = equation.invars[0].aval.shape
        shape = (batch, heads, position, head_size)
        return CUDNN[kind] * pair_flops(shape, shape) * visit.times / visit.share, ""
    if kind == "pallas_call" and phase(str(equation.params["name"])) is None:
        return 0.0, f"kernel {equation.params['name']!r} is not known"
    if kind in ("while", "cond") and any(_multiplies(inner) for inner in called(equation)):
        what = "a loop" if kind == "while" else "a branch"
        return 0.0, f"{what} with matmuls in it runs an unknown number of times"
    if kind in ("ffi_call", "custom_call", "conv_general_dilated", "ragged_dot_general"):
        return 0.0, f"{kind} is not counted"
    return 0.0, ""


def _multiplies(jaxpr: Any) -> bool:
    return any(
        equation.primitive.name in (*_MULTIPLIES, *CUDNN)
        or any(_multiplies(inner) for inner in called(equation))
        for equation in jaxpr.eqns
    )
