"""FLOPs that a train step executes: the upper side of HFU.

    executed = sum over matmuls, as often as loops and recomputation repeat them, of
                   2 x (elements of the result) x (length of what is contracted)
             + sum over fused attention kernels of (matmuls the kernel makes) x
                   2 x batch x heads x head_size x pairs that the mask lets through

Counted in the traced program, after what nothing needs has been dropped: the second forward pass
that `jax.checkpoint` asks for is in it, and so are attention scores above the diagonal where a back
end multiplies them. The compiler may drop a matmul that it finds to be equal to another one (2 %
of a small model's with everything recomputed, none without). Kernels make 2 matmuls forward and,
because the scores are made again, 5 backward (7 by splash attention's two separate kernels); blocks
that a kernel only touches are counted by what the mask lets through. Elementwise work is not
counted, as in every MFU.

What cannot be counted this way (a loop whose length is not known, a kernel that is not known) gives
no figure instead of a wrong one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from jax.interpreters import partial_eval

from models.config import TransformerConfig
from models.flops import attended_pairs
from training.cost.hlo_cost import pair_flops, phase
from training.cost.jaxpr_cost import called, traced_cost

CUDNN = {"dot_product_attention_fwd_wrapper": 2, "dot_product_attention_bwd_wrapper": 5}
_MULTIPLIES = ("dot_general", "pallas_call", "conv_general_dilated", "ragged_dot_general")


def executed_flops(
    closed: Any, model: TransformerConfig, sequence_length: int, devices: int
) -> tuple[float | None, str]:
    """FLOPs of one step over all devices together, or None; and a sentence on the count.

    Args:
        closed: closed jaxpr of the step, traced for all devices.
        model: its windows bound what kernels look at.
        sequence_length: tokens per row.
        devices: that share the step.
    """
    # Dropped first, or it would be looked through for nothing.
    jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    found = list(_special(jaxpr, 1, devices))
    unknown = sorted({reason for _, reason in found if reason})
    if unknown:
        return None, f"HFU is not shown: {'; '.join(unknown)}"
    cost = traced_cost(closed, devices)
    kernels = cost.attention_flops + sum(flops for flops, _ in found)
    total = devices * (cost.matmul_flops + kernels * window_share(model, sequence_length))
    again = devices * cost.recomputed_flops / total if total else 0.0
    return total, f"a step executes {total:.3g} FLOPs, {again:.0%} of them a second time"


def window_share(model: TransformerConfig, length: int) -> float:
    """Pairs that windows let through, as a share of a causal mask's, over all layers."""
    whole = attended_pairs(length)
    return math.fsum(attended_pairs(length, w) / whole for w in model.windows) / len(model.windows)


def _special(jaxpr: Any, times: int, share: int) -> Iterator[tuple[float, str]]:
    """FLOPs on one device of kernels that `jaxpr_cost` does not know, or why there is no count."""
    for equation in jaxpr.eqns:
        kind = equation.primitive.name
        if kind in CUDNN:
            batch, position, heads, head_size = equation.invars[0].aval.shape
            shape = (batch, heads, position, head_size)
            pairs = pair_flops(shape, shape)
            yield CUDNN[kind] * pairs * times / share, ""
        elif kind == "pallas_call":
            if phase(str(equation.params["name"])) is None:
                yield 0.0, f"kernel {equation.params['name']!r} is not known"
        elif kind in ("while", "cond"):
            if any(_multiplies(inner) for inner in called(equation)):
                what = "a loop" if kind == "while" else "a branch"
                yield 0.0, f"{what} with matmuls in it runs we cannot tell how often"
        elif kind in ("ffi_call", "custom_call", "conv_general_dilated", "ragged_dot_general"):
            yield 0.0, f"{kind} is not counted"
        else:
            turns = equation.params["length"] if kind == "scan" else 1
            local = share
            if kind == "shard_map":
                mesh, manual = equation.params["mesh"], equation.params["newly_manual_axes"]
                local = max(share // math.prod(mesh.shape[axis] for axis in manual), 1)
            for inner in called(equation):
                yield from _special(inner, times * turns, local)


def _multiplies(jaxpr: Any) -> bool:
    return any(
        equation.primitive.name in (*_MULTIPLIES, *CUDNN)
        or any(_multiplies(inner) for inner in called(equation))
        for equation in jaxpr.eqns
    )
