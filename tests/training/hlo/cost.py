"""Counts the cost of one step of a compiled program on one device from its HLO.

Counts are of one execution with loops multiplied out. Cycles are the TPU compiler's estimates. It
gives none for Pallas kernels and collectives and ignores overlap, so cycles rank programs but do
not predict seconds. FLOPs of matmuls are exact; those of attention kernels are a formula over the
pairs that a causal mask lets through.
"""

from __future__ import annotations

import functools
import math
import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from models.flops import training_flops_per_token
from tests.training.hlo.parser import Computation, Instruction, Module, Visit, parse, walk
from training.cost.executed_flops import (
    RECOMPUTED,
    Cost,
    Matmul,
    live_equations,
    matmuls,
    pair_flops,
    phase,
    summarise,
    window_share,
)
from training.step.program import Program

_COLLECTIVES = (
    *("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all"),
    *("ragged-all-to-all", "collective-broadcast"),
)
_MATMULS = ("convolution", "dot")
_MOVES = {
    *("copy", "copy-start", "copy-done", "transpose", "bitcast", "reshape", "slice", "pad"),
    *("dynamic-slice", "dynamic-update-slice", "concatenate", "parameter", "constant", "tuple"),
    *("get-tuple-element", "slice-start", "slice-done"),
}
LAYER_LOOP = "layers"
"""Part of the name of every loop over layers: the axis along which the model stacks its blocks."""


@dataclass(frozen=True)
class Collective:
    """Communication of one kind in a step.

    Attributes:
        kind: opcode of the collective, see `_collective_kind`.
        count: number of executions.
        bytes: bytes of operand or result on one device, the larger one, over all executions.
        in_layer_loops: executions inside the loops over layers.
    """

    kind: str
    count: int
    bytes: int
    in_layer_loops: int


@dataclass(frozen=True)
class Operation:
    """An instruction with the compiler's estimate.

    Attributes:
        name: name of the instruction.
        kind: "matmul", "copy" or "other".
        cycles: estimated cycles of all executions in a step.
        times: number of executions in a step.
        flops: FLOPs of its matmuls, over all executions.
        op_name: name of the operation in the traced program.
        result: its arrays, such as "bf16[8,128]".
    """

    name: str
    kind: str
    cycles: int
    times: int
    flops: int
    op_name: str
    result: str


@dataclass(frozen=True)
class CompiledCost(Cost):
    """Cost of one step of a compiled program on one device.

    Attributes:
        cycles: estimate outside kernels and collectives; None when the compiler gave none.
        cycles_by_kind: the same by `Operation.kind`.
        collectives: one entry per kind.
        operations: in descending order of cycles.
        unknown_loops: loops counted as one iteration because the text does not have their length.
    """

    cycles: int | None = None
    cycles_by_kind: dict[str, int] = field(default_factory=dict)
    collectives: tuple[Collective, ...] = ()
    operations: tuple[Operation, ...] = ()
    unknown_loops: int = 0


def program_cost(program: Program, compiled: Any) -> CompiledCost:
    """Cost of one step on one device; of the traced step if the program was not compiled.

    The latter has no cycles, collectives or operations, because only the compiler determines them.
    """
    if compiled is not None:
        return cost(parse(compiled.as_text()))
    traced = program.step.trace(program.abstract, program.abstract_batch())
    return CompiledCost(**vars(traced_cost(traced.jaxpr, program.layout.devices)))


def traced_cost(closed: Any, devices: int) -> Cost:
    """Matmuls of one step on one of `devices` devices, from a closed jaxpr."""
    return summarise(matmuls(live_equations(closed, devices)))


def executed_over_model(program: Program, cost: Cost) -> float:
    """FLOPs of matmuls and attention kernels over the model's, attention counted causally.

    Attention's backward pass recomputes the scores, which the model's FLOPs do not count, so the
    ratio is above 1 even when nothing else is recomputed.
    """
    length = program.train.sequence_length
    kernels = cost.attention_flops * window_share(program.model, length)
    return (cost.matmul_flops + kernels) / model_flops(program)


def model_flops(program: Program) -> float:
    """FLOPs of the model on one device: nothing recomputed, attention counted causally."""
    train = program.train
    tokens = train.batch_size * train.sequence_length / program.layout.devices
    return tokens * training_flops_per_token(program.model, train.sequence_length, causal=True)


def cost(module: Module) -> CompiledCost:
    """Count a compiled program."""
    visits = list(walk(module))
    found = [(visit, _matmul(visit)) for visit in visits]
    counted = summarise(each for _, each in found if each is not None)
    flops: dict[int, int] = defaultdict(int)
    for visit, each in found:
        if each is not None and not each.kernel:
            flops[id(visit.fusion or visit.instruction)] += each.flops * each.times
    contents = _fused(visits)
    operations = [
        _operation(each, times, flops[id(each)], contents.get(id(each), {each.opcode}))
        for each, times in _estimated(visits)
    ]
    by_kind: dict[str, int] = {}
    for each in operations:
        by_kind[each.kind] = by_kind.get(each.kind, 0) + each.cycles
    return CompiledCost(
        **vars(counted),
        cycles=sum(each.cycles for each in operations) if operations else None,
        cycles_by_kind=by_kind,
        collectives=_collectives(visits),
        operations=tuple(sorted(operations, key=lambda each: -each.cycles)),
        unknown_loops=sum(visit.unknown for visit in visits),
    )


def _fused(visits: list[Visit]) -> dict[int, set[str]]:
    """Opcodes inside every outermost fusion, by the fusion's identity."""
    contents: dict[int, set[str]] = defaultdict(set)
    for visit in visits:
        if visit.fusion is not None:
            contents[id(visit.fusion)].add(visit.instruction.opcode)
    return contents


def _estimated(visits: list[Visit]) -> list[tuple[Instruction, int]]:
    """Each instruction with an estimate, with the sum of its executions."""
    times: dict[int, int] = defaultdict(int)
    found: dict[int, Instruction] = {}
    for visit in visits:
        if visit.fusion is None and visit.instruction.cycles:
            found[id(visit.instruction)] = visit.instruction
            times[id(visit.instruction)] += visit.times
    return [(each, times[key]) for key, each in found.items()]


def _operation(each: Instruction, times: int, flops: int, opcodes: set[str]) -> Operation:
    kind = "other"
    if opcodes.intersection(_MATMULS):
        kind = "matmul"
    elif opcodes <= _MOVES | {"fusion"}:
        kind = "copy"
    return Operation(
        name=each.name,
        kind=kind,
        cycles=(each.cycles or 0) * times,
        times=times,
        flops=flops,
        op_name=each.op_name,
        result=" ".join(map(str, each.arrays)),
    )


def _matmul(visit: Visit) -> Matmul | None:
    each = visit.instruction
    if each.opcode in _MATMULS:
        count = dot_flops if each.opcode == "dot" else convolution_flops
        flops, kernel = count(each, visit.computation), ""
    elif each.target == "tpu_custom_call":
        kernel = _kernel_name(each)
        flops = _kernel_flops(each, visit.computation) if phase(kernel) else 0
    else:
        return None
    names = f"{each.name} {visit.fusion.name if visit.fusion else ''}"
    again = RECOMPUTED in each.op_name or bool(re.search(r"\.remat", names))
    return Matmul(kernel, flops, visit.times, again)


def _kernel_name(call: Instruction) -> str:
    """The kernel's name in the traced program, from the op_name ".../name/pallas_call"."""
    parts = call.op_name.split("/")
    return parts[-2] if len(parts) > 1 else re.sub(r"[.\d]+$", "", call.name)


def _kernel_flops(kernel: Instruction, computation: Computation) -> int:
    """FLOPs of one of the kernel's matmuls.

    Queries and keys are the first float operands with at least three axes.
    """
    arrays = (array for arrays in computation.operands(kernel) for array in arrays)
    found = (a.dimensions for a in arrays if "f" in a.dtype and len(a.dimensions) >= 3)
    queries, keys = next(found, None), next(found, None)
    return pair_flops(queries, keys) if queries and keys else 0


def dot_flops(dot: Instruction, computation: Computation) -> int:
    """FLOPs of a dot: 2 x elements of the result x length of the contracted axes."""
    left = computation.operands(dot)[0][0].dimensions
    contracted = math.prod(left[axis] for axis in dot.numbers("lhs_contracting_dims"))
    return 2 * dot.arrays[0].size * contracted


def convolution_flops(convolution: Instruction, computation: Computation) -> int:
    """FLOPs of a convolution, the form that the TPU compiler gives every matmul.

    Additional contracted, batch or head axes become spatial axes whose windows slide into the
    padding. Only taps on real elements count: 2 x batch x input features x output features x taps.
    """
    left, right = (arrays[0].dimensions for arrays in computation.operands(convolution)[:2])
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", convolution.text)
    if labels is None:
        return 0
    window = _window(convolution.text)
    result = convolution.arrays[0].dimensions
    groups = int(convolution.attribute("batch_group_count") or 1)
    taps = 1
    for axis in range(sum(label.isdigit() for label in labels[1])):
        sizes = tuple(
            dimensions[names.index(str(axis))]
            for dimensions, names in zip((left, right, result), labels.groups(), strict=True)
        )
        taps *= _taps(*sizes, *(window[name][axis] for name in _WINDOW))
    batch = left[labels[1].index("b")] // groups
    # The kernel's input features are those of one group already.
    return 2 * batch * right[labels[2].index("i")] * right[labels[2].index("o")] * taps


_WINDOW = ("stride", "pad", "lhs_dilate", "rhs_dilate")


def _window(text: str) -> dict[str, list[int]]:
    """Stride, low padding and dilations of every window axis; the text omits default values."""
    found = re.search(r"window=\{([^}]*)\}", text)
    given = dict(part.split("=") for part in found[1].split()) if found else {}
    values: dict[str, list[int]] = {}
    for name in _WINDOW:
        listed = given[name].split("x") if name in given else []
        default = 0 if name == "pad" else 1
        # Padding is "low_high"; the low part alone determines which elements a tap meets.
        numbers = [int(each.split("_")[0]) for each in listed]
        values[name] = numbers or [default] * 8
    return values


@functools.cache
def _taps(
    left: int, kernel: int, result: int, stride: int, pad: int, left_dilate: int, dilate: int
) -> int:
    """Number of (output position, window position) pairs that meet a real element of the input.

    Output o and tap t meet the dilated input at o x stride - pad + t x dilate. It is a real element
    if it lies inside the input and is a multiple of `left_dilate`.
    """
    outputs = np.arange(result) * stride - pad
    count = 0
    for tap in range(kernel):
        at = outputs + tap * dilate
        real = (at >= 0) & (at % left_dilate == 0) & (at // left_dilate < left)
        count += int(np.count_nonzero(real))
    return count


def _collectives(visits: list[Visit]) -> tuple[Collective, ...]:
    totals: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for visit in visits:
        each = visit.instruction
        kind = _collective_kind(each)
        if kind is None:
            continue
        if visit.fusion is not None and "all-reduce-scatter" in visit.computation.name:
            kind = "reduce-scatter"
        total = totals[kind]
        total[0] += visit.times
        total[1] += visit.times * _bytes_moved(each, visit.computation)
        total[2] += visit.times * any(LAYER_LOOP in loop for loop in visit.loops)
    return tuple(Collective(kind, *total) for kind, total in sorted(totals.items()))


def _collective_kind(each: Instruction) -> str | None:
    """The opcode of a collective; None for other instructions.

    A send over the data-centre network by libtpu's runtime is, for example, "all-reduce between
    slices".
    """
    if each.opcode == "send":
        found = re.search(r'_xla_megascale_transfer_type="(\w+)"', each.text)
        return f"{found[1].lower().replace('_', '-')} between slices" if found else None
    kind = each.opcode.removesuffix("-start")
    return kind if kind in _COLLECTIVES else None


def _bytes_moved(collective: Instruction, computation: Computation) -> int:
    operands = sum(a.bytes for arrays in computation.operands(collective) for a in arrays)
    results = sum(array.bytes for array in collective.arrays)
    if collective.opcode in ("all-gather-start", "collective-permute-start", "send"):
        results -= operands  # the results of these contain their operands
    return max(operands, results)
