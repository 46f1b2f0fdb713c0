"""The seconds of a profiled step by kind of work, from a trace and the text of the program.

An operation's kind follows from the compiled program: a matmul of the layers, of the output head or
of the optimizer, attention, a collective, or memory-bound work. A trace has the times of operations
by name. Its file `parts.json` holds seconds by kind of `training.cost.step_time.KINDS`, of one step
on one device; idle times are in none.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from training.cost.hlo import Instruction, Module, collective_kind, parse

TRACES, PARTS = "traces", "parts.json"
_AROUND = ("while", "call", "conditional", "async-start", "call-start")
"""Their times contain those of other operations."""
_MATMULS = ("dot", "convolution")
_LAYERS = "(layers)"
_ATTENTION = "attention"
"""Names that the model gives to the layers' and attention's operations, forward and backward."""


def kinds(text: str) -> dict[str, str]:
    """The kind of work of each operation of a compiled train step (`compiled.as_text()`)."""
    module = parse(text)
    return {
        each.name: _kind(module, each)
        for computation in module.computations.values()
        for each in computation.instructions.values()
        if each.opcode not in _AROUND
    }


def _kind(module: Module, each: Instruction) -> str:
    inside = [each]
    if each.opcode == "fusion":
        inside += module.computations[str(each.attribute("calls"))].instructions.values()
    if any(collective_kind(one) for one in inside) or each.opcode.endswith("-done"):
        return "communication"
    names = [one.op_name for one in inside if one.op_name]
    matmul = any(one.opcode in _MATMULS or "__cublas" in one.text for one in inside)
    # The gradient of the loss is the one part of a step that JAX differentiates.
    if not any("jvp" in name for name in names):
        return "update"
    if any(_ATTENTION in name for name in names):
        return "attention"
    if not matmul:
        return "elementwise"
    return "matmul" if any(_LAYERS in name for name in names) else "head"


def operations(trace: str) -> Iterator[tuple[str, str, float]]:
    """(device, operation, seconds) of every operation in a trace file `*.xplane.pb`."""
    import jax

    for plane in jax.profiler.ProfileData.from_file(trace).planes:
        for line in plane.lines:
            for event in line.events:
                stats = dict(event.stats)
                name = stats.get("hlo_op")
                if name is None and line.name == "XLA Ops":  # of a TPU: the text of its operation
                    name = event.name.partition(" = ")[0].lstrip("%")
                if name is not None:
                    device = f"{plane.name} {stats.get('device_ordinal', '')}"
                    yield device, str(name), event.duration_ns / 1e9


def write_parts(directory: Path, text: str, steps: int) -> Mapping[str, float]:
    known, total, devices = kinds(text), defaultdict[str, float](float), set[str]()
    for trace in directory.rglob("*.xplane.pb"):
        for device, name, seconds in operations(str(trace)):
            if name in known:
                devices.add(device)
                total[known[name]] += seconds
    found = {kind: each / steps / len(devices) for kind, each in sorted(total.items())}
    (directory / PARTS).write_text(json.dumps(found))
    return found
