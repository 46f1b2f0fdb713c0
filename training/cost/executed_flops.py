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
visible pairs. Elementwise work does not count, as in MFU. Inside `shard_map` shapes are those of
one device; outside they are global, and the count assumes that the devices share the matmuls
evenly. Those of Muon are shared by the devices that divide the optimizer state, and repeated by
each copy of it.

A program with parts that cannot be counted (a loop of unknown length, an unknown kernel) has no
count rather than a wrong one.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.interpreters import partial_eval

from models.config import TransformerConfig
from models.flops import attended_pairs

RECOMPUTED = "rematted_computation"
"""The part of an operation's name that marks a recomputation by `jax.checkpoint`."""

MATMULS = {"fwd": 2, "dq": 3, "dkv": 4}
"""Matmuls over all pairs by splash kernel. Forward: scores, output. dq: scores (recomputed),
gradients of scores and queries. dkv: scores (recomputed), gradients of values, scores and keys."""

CUDNN_FORWARD = "dot_product_attention_fwd_wrapper"
CUDNN = {CUDNN_FORWARD: 2, "dot_product_attention_bwd_wrapper": 5}
"""Matmuls over all pairs by kernel of cuDNN."""

_MULTIPLIES = ("dot_general", "pallas_call", "conv_general_dilated", "ragged_dot_general")


@dataclass(frozen=True)
class Cost:
    """Matmuls of one step on one device.

    Attributes:
        matmul_flops: FLOPs of matmuls outside kernels.
        attention_flops: FLOPs of attention kernels, over the pairs of a causal mask.
        recomputed_dots: matmuls and forward attention kernels that run a second time because the
            remat policy of `jax.checkpoint`, or the compiler, did not keep their result.
        recomputed_flops: FLOPs of those.
        kernels: executions of every Pallas kernel by name.
    """

    matmul_flops: int
    attention_flops: int
    recomputed_dots: int
    recomputed_flops: int
    kernels: dict[str, int]


@dataclass(frozen=True)
class Matmul:
    """A matmul or a kernel call.

    Attributes:
        kernel: the kernel's name, "" for a plain matmul.
        flops: FLOPs of one plain matmul, or of one of a kernel's matmuls over all its pairs.
        times: executions in a step.
        recomputed: whether it repeats a forward computation in the backward pass.
    """

    kernel: str
    flops: int
    times: int
    recomputed: bool


@dataclass(frozen=True)
class Visit:
    """An equation of a jaxpr.

    Attributes:
        equation: the equation.
        times: executions per step; the body of a loop of unknown length counts once.
        share: number of devices that its shapes are divided among.
        recomputed: whether `jax.checkpoint` repeats it in the backward pass.
    """

    equation: Any
    times: int
    share: int
    recomputed: bool


def executed_flops(
    closed: ClosedJaxpr,
    model: TransformerConfig,
    sequence_length: int,
    devices: int,
    repeated: float = 0.0,
) -> tuple[float | None, str]:
    """FLOPs of one step over all devices together, or None; and a sentence about the count.

    Args:
        closed: closed jaxpr of the step, traced for all devices.
        model: its windows limit the pairs that kernels compute.
        sequence_length: tokens per sequence.
        devices: number of devices that share the step.
        repeated: FLOPs of the optimizer that several copies of its state repeat, over all of them
            but one.
    """
    visits = list(live_equations(closed, devices))
    unknown = sorted({reason for visit in visits if (reason := _unknown(visit.equation))})
    if unknown:
        return None, f"HFU is not shown: {'; '.join(unknown)}"
    cost = summarise(matmuls(visits))
    kernels = cost.attention_flops * window_share(model, sequence_length)
    total = devices * (cost.matmul_flops + kernels) + repeated
    again = devices * cost.recomputed_flops / total if total else 0.0
    return total, f"a step executes {total:.3g} FLOPs, {again:.0%} of them a second time"


def live_equations(closed: ClosedJaxpr, devices: int) -> Iterator[Visit]:
    """The equations of a closed jaxpr, inner ones included, without dead code."""
    jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    return _visits(jaxpr, 1, devices, False)


def _visits(jaxpr: Jaxpr, times: int, share: int, again: bool) -> Iterator[Visit]:
    for equation in jaxpr.eqns:
        kind = equation.primitive.name
        inside = again or RECOMPUTED in str(equation.source_info.name_stack)
        yield Visit(equation, times, share, inside)
        if kind == "pallas_call":
            continue
        turns = equation.params["length"] if kind == "scan" else 1
        local = share
        if kind == "shard_map":
            mesh, manual = equation.params["mesh"], equation.params["newly_manual_axes"]
            local = max(share // math.prod(mesh.shape[axis] for axis in manual), 1)
        for inner in called(equation):
            yield from _visits(inner, times * turns, local, inside)


def called(equation: Any) -> Iterator[Jaxpr]:
    """The jaxprs that an equation runs."""
    for value in equation.params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            each = getattr(each, "jaxpr", each)
            if hasattr(each, "eqns"):
                yield each


def matmuls(visits: Iterable[Visit]) -> Iterator[Matmul]:
    """The matmuls and kernel calls among equations."""
    for visit in visits:
        equation, kind = visit.equation, visit.equation.primitive.name
        if kind == "dot_general":
            kernel, flops = "", _dot_flops(equation)
        elif kind == "pallas_call":
            kernel = str(equation.params["name"])
            flops = _kernel_flops(equation, kernel)
        elif kind in CUDNN:
            batch, position, heads, head_size = equation.invars[0].aval.shape
            shape = (batch, heads, position, head_size)
            kernel, flops = kind, pair_flops(shape, shape)
        else:
            continue
        if flops or kernel:
            yield Matmul(kernel, flops // visit.share, visit.times, visit.recomputed)


def _dot_flops(equation: Any) -> int:
    (contracted, _), (batch, _) = equation.params["dimension_numbers"]
    left, right = (variable.aval.shape for variable in equation.invars)
    if len(contracted) + len(batch) == len(left) == len(right):
        return 0  # a sum of elementwise products, which the compiler does not execute as a matmul
    return 2 * equation.outvars[0].aval.size * math.prod(left[axis] for axis in contracted)


def _kernel_flops(equation: Any, kernel: str) -> int:
    if phase(kernel) is None:
        return 0
    arrays = (variable.aval for variable in equation.invars)
    found = (a.shape for a in arrays if a.ndim >= 3 and "float" in a.dtype.name)
    return pair_flops(next(found), next(found))


def phase(kernel: str) -> str | None:
    """ "fwd", "dq" or "dkv" of a splash kernel's name; None for other kernels."""
    found = re.search(r"splash_\w*?_(fwd|dq|dkv)(?:_|$)", kernel)
    return found[1] if found else None


def pair_flops(queries: tuple[int, ...], keys: tuple[int, ...]) -> int:
    """FLOPs of one matmul over the visible pairs of queries [..., heads, position, head_size].

    A device with Q of a sequence's K positions as queries and all K as keys counts Q (K + 1) / 2
    pairs, its equal share of K (K + 1) / 2: the devices of a sequence balance the causal work.
    """
    *outer, first, second = queries
    # The last two axes come in either order; the position axis is taken to be the longer one.
    position, head_size = max(first, second), min(first, second)
    return 2 * math.prod(outer) * head_size * position * (max(keys[-2:]) + 1) // 2


def summarise(counted: Iterable[Matmul]) -> Cost:
    """FLOPs and recomputation of a list of matmuls."""
    found = list(counted)
    kernels: Counter[str] = Counter()
    for each in found:
        if each.kernel:
            kernels[each.kernel] += each.times
    # The fused backward kernel is named dkv but also computes the queries' gradient: 5 matmuls.
    fused = not any(phase(name) == "dq" for name in kernels)
    made = {**MATMULS, "dkv": MATMULS["dkv"] + fused, None: 0}

    def flops(each: Matmul) -> int:
        count = CUDNN.get(each.kernel) or made[phase(each.kernel)] if each.kernel else 1
        return each.flops * count * each.times

    forward = ("", CUDNN_FORWARD)
    again = [
        each
        for each in found
        if each.recomputed and (each.kernel in forward or phase(each.kernel) == "fwd")
    ]
    return Cost(
        matmul_flops=sum(flops(each) for each in found if not each.kernel),
        attention_flops=sum(flops(each) for each in found if each.kernel),
        recomputed_dots=sum(each.times for each in again),
        recomputed_flops=sum(flops(each) for each in again),
        kernels=dict(kernels),
    )


def window_share(model: TransformerConfig, length: int) -> float:
    """Visible pairs with windows / pairs of a causal mask, the mean over all layers."""
    whole = attended_pairs(length)
    return math.fsum(attended_pairs(length, w) / whole for w in model.windows) / len(model.windows)


def _unknown(equation: Any) -> str:
    """Why an equation cannot be counted; empty when it can."""
    kind = equation.primitive.name
    if kind == "pallas_call" and phase(str(equation.params["name"])) is None:
        return f"kernel {equation.params['name']!r} is not known"
    if kind in ("while", "cond") and any(_multiplies(inner) for inner in called(equation)):
        what = "a loop" if kind == "while" else "a branch"
        return f"{what} with matmuls in it runs an unknown number of times"
    if kind in ("ffi_call", "custom_call", "conv_general_dilated", "ragged_dot_general"):
        return f"{kind} is not counted"
    return ""


def _multiplies(jaxpr: Jaxpr) -> bool:
    return any(
        equation.primitive.name in (*_MULTIPLIES, *CUDNN)
        or any(_multiplies(inner) for inner in called(equation))
        for equation in jaxpr.eqns
    )
