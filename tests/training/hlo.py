"""What a compiled program does in a step: matmuls, collectives and estimated cycles, from its HLO.

Cycles are the TPU compiler's estimates; it gives none for Pallas kernels and collectives, and
ignores overlap.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass

from training.cost.hlo import Visit, bytes_moved, collective_kind, parse, walk

LAYER_LOOP = "layers"
"""Part of the name of every loop over layers: the axis along which the model stacks its blocks."""


@dataclass(frozen=True)
class Collective:
    """Executions in a step, bytes on one device of all, and executions in loops over layers."""

    kind: str
    count: int
    bytes: int
    in_layer_loops: int


@dataclass(frozen=True)
class Cost:
    """Cost of one step on one device.

    Attributes:
        matmul_flops: of dots; the TPU compiler writes matmuls as convolutions, which do not count.
        cycles: estimate outside kernels and collectives; 0 when the compiler gave none.
        unknown_loops: loops counted as one iteration because the text does not have their length.
    """

    matmul_flops: int
    cycles: int
    collectives: tuple[Collective, ...]
    unknown_loops: int


def cost(text: str) -> Cost:
    visits = list(walk(parse(text)))
    return Cost(
        matmul_flops=sum(each.times * _dot_flops(each) for each in visits),
        cycles=sum(v.times * _cycles(v.instruction.text) for v in visits if v.fusion is None),
        collectives=_collectives(visits),
        unknown_loops=sum(visit.unknown for visit in visits),
    )


def _cycles(text: str) -> int:
    found = re.search(r'"estimated_cycles":"(\d+)"', text)
    return int(found[1]) if found else 0


def _dot_flops(visit: Visit) -> int:
    """FLOPs of a dot: 2 x elements of the result x length of the contracted axes."""
    dot = visit.instruction
    if dot.opcode != "dot":
        return 0
    left = visit.computation.operands(dot)[0][0].dimensions
    contracted = math.prod(left[axis] for axis in dot.numbers("lhs_contracting_dims"))
    return 2 * dot.arrays[0].size * contracted


def _collectives(visits: list[Visit]) -> tuple[Collective, ...]:
    totals: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for visit in visits:
        each = visit.instruction
        kind = collective_kind(each)
        if kind is None:
            continue
        if visit.fusion is not None and "all-reduce-scatter" in visit.computation.name:
            kind = "reduce-scatter"
        total = totals[kind]
        total[0] += visit.times
        total[1] += visit.times * bytes_moved(each, visit.computation)
        total[2] += visit.times * any(LAYER_LOOP in loop for loop in visit.loops)
    return tuple(Collective(kind, *total) for kind, total in sorted(totals.items()))
