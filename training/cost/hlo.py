"""Reads the text of a compiled program (HLO): its instructions, and how often a step runs each.

Loops are multiplied out, which XLA's own `cost_analysis` does not do. Imports no JAX.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+)(?: \(.*\) -> .*)? \{$")
_END = re.compile(r'^\}(, execution_thread="\w+")?$')
_INSTRUCTION = re.compile(r"^  (ROOT )?%?([\w.\-]+) = (.*)$", re.DOTALL)
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\]")
_NAME = re.compile(r"%?([A-Za-z_][\w.\-]*)$")


@dataclass(frozen=True)
class Array:
    """Element type and dimensions of one array on one device, without its layout."""

    dtype: str
    dimensions: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.dimensions)

    @property
    def bytes(self) -> int:
        bits = re.search(r"\d+", self.dtype)
        return self.size * (8 if self.dtype == "pred" else int(bits[0]) if bits else 0) // 8


@dataclass(frozen=True)
class Instruction:
    """One line of HLO.

    `text` follows the operands: attributes, metadata, backend configuration. `on_host`: a result is
    in the host's memory.
    """

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    text: str
    root: bool
    on_host: bool = False

    @property
    def op_name(self) -> str:
        """Name of its operation in the traced program; "" where the text has none."""
        found = re.search(r'op_name="([^"]*)"', self.text)
        return found[1] if found else ""

    def attribute(self, name: str) -> str | None:
        """The name or number after `name=`; None where the text does not have it."""
        found = re.search(rf"\b{name}=%?([\w.\-]+)", self.text)
        return found[1] if found else None

    def numbers(self, name: str) -> tuple[int, ...]:
        """The list after `name={...}`, empty where the text does not have it."""
        found = re.search(rf"\b{name}=\{{([\d,\s]*)\}}", self.text)
        return tuple(int(x) for x in found[1].split(",") if x.strip()) if found else ()

    @property
    def branches(self) -> tuple[str, ...]:
        if found := re.search(r"branch_computations=\{([^}]*)\}", self.text):
            return tuple(name.strip().lstrip("%") for name in found[1].split(","))
        names = (self.attribute("true_computation"), self.attribute("false_computation"))
        return tuple(name for name in names if name)


@dataclass(frozen=True)
class Computation:
    """A list of instructions by name, in order."""

    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)

    @property
    def root(self) -> Instruction:
        return next(each for each in self.instructions.values() if each.root)

    def operands(self, instruction: Instruction) -> list[tuple[Array, ...]]:
        return [
            self.instructions[name].arrays if name in self.instructions else ()
            for name in instruction.operands
        ]


@dataclass(frozen=True)
class Module:
    """A compiled program; `donated` numbers the parameters whose memory a result takes."""

    computations: dict[str, Computation]
    entry: str
    donated: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Visit:
    """An instruction of a computation and its number of executions per step.

    `loops` has the op_name of every loop around it, outermost first, and `fusion` is the outermost
    one that contains it. A loop whose trip count is `unknown` counts as 1.
    """

    instruction: Instruction
    computation: Computation
    times: int
    loops: tuple[str, ...]
    fusion: Instruction | None
    unknown: bool = False


def parse(text: str) -> Module:
    computations: dict[str, Computation] = {}
    entry, current, pending = None, None, ""
    for line in text.splitlines():
        if current is None:
            if header := _HEADER.match(line):
                current = computations.setdefault(header[2], Computation(header[2]))
                entry = header[2] if header[1] else entry
            continue
        # A kernel's attributes contain newlines and lines that start with "}". Therefore only a
        # line with a brace and at most an execution thread ends a computation, and only
        # "  name = " starts an instruction.
        end = _END.match(line)
        if not end and not _INSTRUCTION.match(line):
            pending += "\n" + line
            continue
        _add(current, pending)
        pending = line
        if end:
            current, pending = None, ""
    assert entry is not None, "no line starts with ENTRY"
    header, _, _ = text.partition("\n")
    donated = re.findall(r"\}: \((\d+), \{[\d, ]*\}, (?:may|must)-alias\)", header)
    return Module(computations, entry, frozenset(map(int, donated)))


def _add(computation: Computation, line: str) -> None:
    found = _INSTRUCTION.match(line)
    if found is None:
        return
    name, rest = found[2], found[3]
    end = _closing(rest) if rest.startswith("(") else rest.index(" ") - 1
    results = rest[: end + 1]
    arrays = tuple(
        Array(kind, tuple(int(re.sub(r"\D", "", size)) for size in sizes.split(",") if size))
        for kind, sizes in _ARRAY.findall(results)
    )
    opcode, _, rest = rest[end + 2 :].partition("(")
    end = _closing("(" + rest) - 1
    literal = opcode in ("constant", "parameter")
    operands, text = ((), rest) if literal else (_operands(rest[:end]), rest[end + 1 :])
    computation.instructions[name] = Instruction(
        name, opcode, arrays, operands, text, bool(found[1]), on_host="S(5)" in results
    )


def _closing(text: str) -> int:
    """Index of the parenthesis that closes the one `text` starts with."""
    depth = 0
    for match in re.finditer(r"[()]", text):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    return len(text)


def _operands(text: str) -> tuple[str, ...]:
    text = re.sub(r"/\*.*?\*/", "", text)
    # Remove operand types, because their dimensions contain commas.
    text = re.sub(r"\{[^}]*\}|\[[^\]]*\]", "", text)
    names = (_NAME.search(part.strip()) for part in text.split(","))
    return tuple(name[1] for name in names if name)


def walk(module: Module) -> Iterator[Visit]:
    """Every instruction that a step executes, including those inside fusions.

    All branches of a conditional are visited, as if each were taken.
    """
    return _walk(module, module.entry, 1, (), None)


def _walk(
    module: Module, name: str, times: int, loops: tuple[str, ...], fusion: Instruction | None
) -> Iterator[Visit]:
    computation = module.computations[name]
    for each in computation.instructions.values():
        count = turns(module, computation, each) if each.opcode == "while" else 1
        yield Visit(each, computation, times, loops, fusion, unknown=count is None)
        if each.opcode == "while":
            inside = (*loops, each.op_name)
            inner_times = times * (1 if count is None else count)
            yield from _walk(module, str(each.attribute("body")), inner_times, inside, fusion)
        elif each.opcode == "fusion":
            called = str(each.attribute("calls"))
            yield from _walk(module, called, times, loops, fusion or each)
        elif each.opcode in ("call", "call-start", "async-start"):
            called = each.attribute("to_apply") or each.attribute("calls")
            yield from _walk(module, str(called), times, loops, fusion)
        elif each.opcode == "conditional":
            for branch in each.branches:
                yield from _walk(module, branch, times, loops, fusion)


def turns(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """Trip count of a counted loop: ceil((bound - start) / step); None when it cannot be read.

    Prefers XLA's own annotation. Otherwise the condition compares an element of the carried tuple
    with a constant; the element starts at a constant and grows by a constant (by two in the ring
    loops that the compiler unrolls). A start that cannot be read counts as 0, a step as 1.
    """
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.text):
        return int(known[1])
    condition = module.computations[str(loop.attribute("condition"))]
    found = _bound(module, condition)
    if found is None:
        return None
    index, bound = found
    start = 0
    carried = computation.instructions.get(loop.operands[0])
    if carried is not None and carried.opcode == "tuple":
        start = _constant(computation, carried.operands[index]) or 0
    step = _step(module, module.computations[str(loop.attribute("body"))], index)
    return max(math.ceil((bound - start) / step), 0)


def _step(module: Module, body: Computation, index: int) -> int:
    """The constant that the body adds to an element of the carried tuple; 1 if not readable."""
    if body.root.opcode != "tuple":
        return 1
    each = body.instructions.get(body.root.operands[index])
    if each is None:
        return 1
    source, each, outer = _inside(module, body, each)
    if each.opcode != "add":
        return 1
    values = (
        _constant(body, outer[name]) if name in outer else _constant(source, name)
        for name in each.operands
    )
    return next((value for value in values if value), 1)


def _bound(module: Module, condition: Computation) -> tuple[int, int] | None:
    """(index of the compared element of the carried tuple, exclusive bound); None if not found."""
    inner, root, outer = _inside(module, condition, condition.root)
    if root.opcode != "compare":
        return None
    index = bound = None
    for name in root.operands:
        source = condition if name in outer else inner
        name = outer.get(name, name)
        each = source.instructions[name]
        if each.opcode == "get-tuple-element":
            index = int(each.attribute("index") or 0)
        else:
            bound = _constant(source, name)
    if index is None or bound is None:
        return None
    return index, bound + (root.attribute("direction") == "LE")


def _inside(
    module: Module, computation: Computation, each: Instruction
) -> tuple[Computation, Instruction, dict[str, str]]:
    """The computation of a fusion, its root, and the operands by the names of its parameters.

    Another instruction and its computation are returned as they are.
    """
    if each.opcode != "fusion":
        return computation, each, {}
    called = module.computations[str(each.attribute("calls"))]
    parameters = {
        name: each.operands[int(inner.text.partition(")")[0])]
        for name, inner in called.instructions.items()
        if inner.opcode == "parameter"
    }
    return called, called.root, parameters


def _constant(computation: Computation, name: str) -> int | None:
    """The value of an integer constant, also through copies; None for anything else."""
    each = computation.instructions.get(name)
    while each is not None and each.opcode in ("copy", "bitcast", "convert"):
        each = computation.instructions.get(each.operands[0])
    if each is None or each.opcode != "constant":
        return None
    value = each.text.partition(")")[0]
    return int(value) if re.fullmatch(r"-?\d+", value) else None


COLLECTIVE = re.compile(
    "all-reduce|all-gather|reduce-scatter|(ragged-)?all-to-all|collective-(permute|broadcast)"
)


def collective_kind(each: Instruction) -> str | None:
    """The opcode of a collective; None for other instructions.

    A send over the data-centre network by libtpu's runtime is, for example, "all-reduce between
    slices".
    """
    if each.opcode == "send":
        found = re.search(r'_xla_megascale_transfer_type="(\w+)"', each.text)
        return f"{found[1].lower().replace('_', '-')} between slices" if found else None
    kind = each.opcode.removesuffix("-start")
    return kind if COLLECTIVE.fullmatch(kind) else None


def bytes_moved(collective: Instruction, computation: Computation) -> int:
    operands = sum(a.bytes for arrays in computation.operands(collective) for a in arrays)
    results = sum(array.bytes for array in collective.arrays)
    if collective.opcode in ("all-gather-start", "collective-permute-start", "send"):
        results -= operands  # the results of these contain their operands
    return max(operands, results)
