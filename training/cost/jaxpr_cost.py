"""The counts of `training.cost.hlo_cost`, from a traced program instead of a compiled one.

A program that does not fit in memory has no compiled HLO, but its trace has the same matmuls and
kernels after dead-code elimination. Inside `shard_map` shapes are those of one device; outside they
are global, and the count assumes that the devices share the matmuls evenly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from jax.interpreters import partial_eval

from training.cost.hlo_cost import RECOMPUTED, Cost, Matmul, pair_flops, phase, summarise


def traced_cost(closed: Any, devices: int) -> Cost:
    """Cost of one step on one of `devices` devices, from a closed jaxpr.

    Cycles, collectives and operations stay empty, because only the compiler determines them.
    """
    jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    return summarise(_matmuls(jaxpr, 1, devices, False), "traced")


def _matmuls(jaxpr: Any, times: int, share: int, again: bool) -> Iterator[Matmul]:
    for equation in jaxpr.eqns:
        kind = equation.primitive.name
        name = str(equation.source_info.name_stack)
        inside = again or RECOMPUTED in name
        if kind == "dot_general":
            if flops := _dot_flops(equation):
                yield Matmul("", flops // share, times, inside)
        elif kind == "pallas_call":
            kernel = str(equation.params["name"])
            yield Matmul(kernel, _kernel_flops(equation, kernel) // share, times, inside)
        else:
            turns = equation.params["length"] if kind == "scan" else 1
            local = share
            if kind == "shard_map":
                mesh, manual = equation.params["mesh"], equation.params["newly_manual_axes"]
                local = max(share // math.prod(mesh.shape[axis] for axis in manual), 1)
            for inner in called(equation):
                yield from _matmuls(inner, times * turns, local, inside)


def called(equation: Any) -> Iterator[Any]:
    """The jaxprs that an equation runs."""
    for value in equation.params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            each = getattr(each, "jaxpr", each)
            if hasattr(each, "eqns"):
                yield each


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
