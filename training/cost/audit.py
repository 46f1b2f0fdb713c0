"""What costs time or precision in a compiled train step, worst first, and the settings against it.

The predicted seconds are bytes / the chip's rates, or FLOPs / its peak, as if nothing hid them;
none was timed on a chip. Made for libtpu's programs, whose order of instructions is the order of
execution. Imports no JAX.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pipeline.accelerators import Chip
from training.cost.hlo import Instruction, Module, Visit, bytes_moved, collective_kind, parse, walk
from training.cost.step_time import HOST_LINK, NETWORK, rates
from training.cost.step_work import tile_of

LARGE = 2**20
"""Bytes of a collective that is worth a line."""
LARGE_COPY = 4 * 2**20
"""The same of a copy or an argument."""
TERMS = 256
"""A bfloat16 sum of equal terms stops growing there: it has 8 bits."""
PADDED = 1.25
"""Executed FLOPs of a matmul / those that it needs."""

WAITS, NARROW, PADS, TWICE = "waits", "sums below float32", "pads", "computes twice"
COPIES, KEEPS, HOST = "copies", "keeps an argument", "moves to or from the host"
CURES = {
    WAITS: 'fewer microbatches, or Parallelism.reduce "step"; sharding "zero1" gathers once a step',
    NARROW: 'Parallelism.sums "float32"; compute_dtype "float32"',
    PADS: "head_size, mlp, embed and vocab_multiple of 256; less Parallelism.tensor",
    TWICE: "a remat that keeps its result; more microbatches or devices make room",
    COPIES: "none for sure: attention, unroll and remat change the compiler's layouts",
    KEEPS: "none: the program is at fault",
    HOST: 'remat without "offload:"; Parallelism.optimizer_memory "device"',
}


@dataclass(frozen=True)
class Flaw:
    """Equal events of a step, on one device.

    `kind` is a key of `CURES`, and `what` the operation with the end of its name in the traced
    program. `bytes` (0 for matmuls and sums) and predicted `seconds` (0 for kernels and sums) are
    of all `times` that a step executes it, if nothing hides them.
    """

    kind: str
    what: str
    times: int
    bytes: int
    seconds: float

    def __str__(self) -> str:
        size = f", {self.bytes / 2**20:,.0f} MiB" if self.bytes else ""
        cost = f"{1e3 * self.seconds:.2f} ms" if self.seconds else ""
        return f"{cost:>9} {self.kind}: {self.what}, {self.times} a step{size}"


def audit(text: str, chip: Chip) -> tuple[Flaw, ...]:
    """The flaws in a program of one kind of chip, `text` its optimized HLO; the worst first."""
    module = parse(text)
    found: dict[tuple[str, str], Flaw] = {}
    for each in (*_of_instructions(module, chip), *_arguments(module)):
        key = each.kind, each.what
        if other := found.get(key):
            times, size = each.times + other.times, each.bytes + other.bytes
            each = Flaw(*key, times, size, each.seconds + other.seconds)
        found[key] = each
    return tuple(sorted(found.values(), key=lambda each: (-each.seconds, -each.bytes, each.what)))


def _of_instructions(module: Module, chip: Chip) -> Iterator[Flaw]:
    seen = _hidden(module)
    for visit in walk(module):
        each = visit.instruction
        # A fused collective stands in its start, its end and every part.
        if (kind := collective_kind(each)) and (channel := _channel(each)) not in seen:
            seen.add(channel)
            if (moved := bytes_moved(each, visit.computation)) >= LARGE:
                seconds = visit.times * _link(kind, moved, chip)
                yield Flaw(WAITS, *_event(visit, kind), visit.times * moved, seconds)
        if dtype := _narrow(module, visit):
            yield Flaw(NARROW, *_event(visit, f"{each.opcode} in {dtype}"), 0, 0.0)
        if each.opcode in ("dot", "convolution"):
            yield from _matmul(visit, chip)
        elif each.opcode == "custom-call" and "tpu_custom_call" in each.text and _again(each):
            yield Flaw(TWICE, *_event(visit, "a kernel"), 0, 0.0)
        elif visit.fusion is None:
            yield from _moves(module, visit, chip)


def _matmul(visit: Visit, chip: Chip) -> Iterator[Flaw]:
    sizes = _sizes(visit)
    if sizes is None:
        return
    flops, executed = _flops(*sizes, side=tile_of(chip))
    seconds = visit.times * flops / (chip.peak * rates(chip).matmul)
    if executed > PADDED * flops:
        ratio = executed / flops
        what = _event(visit, f"{ratio:.1f} x of a matmul")
        yield Flaw(PADS, *what, 0, seconds * (ratio - 1))
    if _again(visit.instruction):
        yield Flaw(TWICE, *_event(visit, "a matmul"), 0, seconds)


def _moves(module: Module, visit: Visit, chip: Chip) -> Iterator[Flaw]:
    each, times = visit.instruction, visit.times
    size = sum(array.bytes for array in each.arrays)
    if size >= LARGE_COPY and _is_copy(module, each):
        seconds = 2 * size * times / chip.bandwidth
        yield Flaw(COPIES, *_event(visit, each.opcode), size * times, seconds)
    if each.opcode == "copy-start" and _crosses(visit):
        size = times * max(array.bytes for array in each.arrays)
        yield Flaw(HOST, *_event(visit, "copy"), size, size / HOST_LINK)


def _event(visit: Visit, what: str) -> tuple[str, int]:
    """A line's text, and the times that it happens."""
    parts = re.sub(r"\w+\(|\)", "", visit.instruction.op_name).split("/")
    named = [part for part in parts if re.search("[a-z]", part) and part not in _PLUMBING]
    inside = ["layers"] if any("layers" in loop for loop in visit.loops) else []
    place = "/".join([*inside, *named[-2:]])
    return f"{what} ({place[:70]})" if place else what, visit.times


_PLUMBING = {"train_step", "layers", "while", "body", "closed_call", "checkpoint", "shard_map"}


def _channel(collective: Instruction) -> str:
    return collective.attribute("channel_id") or collective.name


def _hidden(module: Module) -> set[str]:
    """Channels of the collectives beside which something is computed."""
    found = set()
    for computation in module.computations.values():
        every = list(computation.instructions.values())
        for place, each in enumerate(every):
            fused = computation.name.startswith("async_collective_fusion")
            starts = each.opcode == "send" or each.opcode.endswith("-start")
            if not fused and not (starts and _works_beside(every[place + 1 :], each)):
                continue
            name = each.attribute("to_apply") or each.attribute("calls")
            called = module.computations.get(str(name))
            inside = called.instructions.values() if called else ()
            found |= {_channel(other) for other in (each, *inside) if collective_kind(other)}
    return found


_WORK = ("fusion", "convolution", "dot", "while", "custom-call", "call")


def _works_beside(following: Iterable[Instruction], start: Instruction) -> bool:
    """Whether something is computed before the instruction that waits for `start`."""
    for each in following:
        if start.name in each.operands and each.opcode.endswith(("-done", "-update")):
            return False
        if each.opcode in _WORK and "Async" not in each.text:
            return True
    return False


def _link(kind: str, moved: int, chip: Chip) -> float:
    """Seconds of a collective of many chips, that of a ring on all links."""
    twice = 2 if kind.startswith("all-reduce") else 1
    if kind.endswith("between slices"):
        return moved / NETWORK.get(chip.name, math.inf)
    return twice * moved / (chip.link * chip.links)


def _narrow(module: Module, visit: Visit) -> str:
    """The type of less than 32 bits in which many numbers are added up; empty where none is."""
    each = visit.instruction
    opcode = each.opcode.removesuffix("-start")
    types = [array.dtype for array in each.arrays if array.dtype in ("bf16", "f16")]
    added = module.computations.get(str(each.attribute("to_apply")))
    if not types or added is None or "add" not in added.root.opcode:
        return ""
    terms = 0.0
    if opcode in ("all-reduce", "reduce-scatter"):
        listed = re.search(r"replica_groups=\{\{([\d,]*)\}", each.text)
        counted = re.search(r"replica_groups=\[\d+,(\d+)\]", each.text)
        terms = int(counted[1]) if counted else len(listed[1].split(",")) if listed else 0
    elif opcode == "reduce" and (operands := visit.computation.operands(each)) and operands[0]:
        terms = operands[0][0].size / max(each.arrays[0].size, 1)
    elif opcode == "reduce-window" and (window := re.search(r"window=\{size=([\dx]+)", each.text)):
        terms = math.prod(int(side) for side in window[1].split("x"))
    elif opcode == "scatter":
        terms = math.inf  # how often a row is added to is known by the ids alone
    return types[0] if terms > TERMS else ""


def _sizes(visit: Visit) -> tuple[int, int, int, int] | None:
    """Batch, rows, columns and contracted numbers of a dot or convolution; None if not readable.

    libtpu writes most matmuls as convolutions. A spatial axis is contracted too, or, where padding
    or dilation keep its parts apart, a batch.
    """
    each, operands = visit.instruction, visit.computation.operands(visit.instruction)
    if len(operands) < 2 or not operands[0] or not operands[1]:
        return None
    left, right = operands[0][0].dimensions, operands[1][0].dimensions
    if each.opcode == "dot":
        contracted = math.prod(left[axis] for axis in each.numbers("lhs_contracting_dims"))
        batch = math.prod(left[axis] for axis in each.numbers("lhs_batch_dims"))
        columns = math.prod(right) // max(contracted * batch, 1)
    else:
        labels = re.search(r"dim_labels=(\w+)_(\w+)->", each.text)
        if labels is None:
            return None
        contracted, batch = left[labels[1].index("f")], 1
        columns = right[labels[2].index("o")]
        for axis in re.findall(r"\d", labels[1]):
            shared = min(left[labels[1].index(axis)], right[labels[2].index(axis)])
            if "lhs_dilate" in each.text or "rhs_dilate" in each.text:
                batch *= shared
            else:
                contracted *= shared
    found = batch, each.arrays[0].size // max(columns * batch, 1), columns, contracted
    return found if all(found) else None


def _flops(
    batch: int, rows: int, columns: int, contracted: int, *, side: int
) -> tuple[float, float]:
    """(FLOPs, FLOPs with the axes padded to the matrix unit's tile).

    The unit holds a tile of one operand, contracted by columns, and streams the other by rows of 8;
    the better of the two ways counts.
    """

    def padded(size: int, tile: int) -> int:
        return tile * math.ceil(size / tile)

    held = padded(contracted, side)
    best = min(padded(rows, 8) * padded(columns, side), padded(rows, side) * padded(columns, 8))
    return 2.0 * batch * rows * columns * contracted, 2.0 * batch * held * best


def _again(each: Instruction) -> bool:
    return "rematted_computation" in each.op_name


_MOVES = {"parameter", "copy", "transpose", "bitcast", "convert", "reshape", "tuple"}


def _is_copy(module: Module, each: Instruction) -> bool:
    """Whether an instruction only writes its operand in another order."""
    if each.opcode != "fusion":
        return each.opcode in ("copy", "transpose")
    inside = module.computations[str(each.attribute("calls"))].instructions.values()
    opcodes = {inner.opcode for inner in inside}
    return opcodes <= _MOVES and bool(opcodes & {"copy", "transpose"})


def _crosses(visit: Visit) -> bool:
    each, given = visit.instruction, visit.computation.instructions
    return each.on_host or any(given[name].on_host for name in each.operands if name in given)


def _arguments(module: Module) -> Iterator[Flaw]:
    """Large arguments whose memory no result takes."""
    for each in module.computations[module.entry].instructions.values():
        size = sum(array.bytes for array in each.arrays)
        if each.opcode != "parameter" or size < LARGE_COPY or each.arrays[0].dtype == "s32":
            continue  # the batch is of no use to a result
        if int(each.text.partition(")")[0]) not in module.donated:
            yield Flaw(KEEPS, each.op_name or each.name, 1, size, 0.0)
