"""Compiles a train step with the TPU compiler before a slice is requested.

    program = build_program(model, optimizer, train, describe("v6e-16"), eos_id=0)
    verdict, compiled = preflight(program)

The compiler refuses a program that does not fit within seconds; one that fits takes as long to
compile as on the slice itself.
"""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass
from typing import Any

import jax

from pipeline.accelerators import chip_of
from training.cost.topology import compiler_versions
from training.step.program import Program

GIB = 2**30
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"([\d.]+)([KMGT]?)B?"
_TEMPORARIES = re.compile(rf"HLO temporaries \({_SIZE}\) exceeds available HBM \({_SIZE}\)")
_USED = re.compile(rf"Used {_SIZE} of {_SIZE} hbm")


@dataclass(frozen=True)
class Preflight:
    """The compiler's verdict on a train step; sizes are those of one device.

    Attributes:
        limit_gib: memory that a program may use; None for a device whose limit is unknown.
        need_gib: arguments and temporaries; outputs reuse the donated arguments. The compiler
            overlaps temporaries with dead arguments, so a program that fits may use less.
        peak_gib: peak memory in use, the program's code included; None when it does not fit.
        arguments_gib: state and batch.
        temporaries_gib: intermediates, without those offloaded to the host.
        host_gib: host memory; None when it does not fit.
        estimate_gib: estimate of `training.cost.memory_estimate` by content; compare its sum with
            `need_gib`.
    """

    fits: bool
    limit_gib: float | None
    need_gib: float
    peak_gib: float | None
    arguments_gib: float
    temporaries_gib: float
    host_gib: float | None
    compile_seconds: float
    estimate_gib: dict[str, float]
    versions: dict[str, str | None]


def preflight(program: Program) -> tuple[Preflight, jax.stages.Compiled | None]:
    """Compile the train step of `program` for its devices and report its memory.

    The verdict, and the compiled step, None if it does not fit. Compiler errors other than too
    little device memory propagate.
    """
    lowered, arguments = program.lower(), argument_bytes(program)
    chip = chip_of(program.layout.mesh.devices.flat[0].device_kind)
    limit = chip.usable if chip is not None else None
    compiled: jax.stages.Compiled | None = None
    spent: dict[str, Any]
    started = time.perf_counter()
    try:
        compiled = lowered.compile()
        spent = _spent(compiled)
    except jax.errors.JaxRuntimeError as error:
        refusal = parse_refusal(str(error), arguments)
        if refusal is None:
            raise
        temporaries, limit = refusal
        spent = {
            "need_gib": (temporaries + arguments) / GIB,
            "peak_gib": None,
            "arguments_gib": arguments / GIB,
            "temporaries_gib": temporaries / GIB,
            "host_gib": None,
        }
    seconds = time.perf_counter() - started
    verdict = Preflight(
        fits=compiled is not None,
        limit_gib=None if limit is None else limit / GIB,
        **spent,
        compile_seconds=seconds,
        estimate_gib={name: size / GIB for name, size in program.estimate.parts.items()},
        versions=compiler_versions(),
    )
    return verdict, compiled


def argument_bytes(program: Program) -> int:
    """Bytes of state and batch on one device, without the padding of tiles."""
    leaves = jax.tree.leaves((program.abstract, program.abstract_batch()))
    return sum(
        leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in leaves
    )


def parse_refusal(message: str, arguments: float) -> tuple[float, float] | None:
    """Bytes of intermediates and of the limit in an out-of-memory error; None for other errors.

    `arguments` are the bytes of state and batch, which the total in some messages includes.
    """
    if "RESOURCE_EXHAUSTED" not in message:
        return None
    found, included = _TEMPORARIES.search(message), 0.0
    if found is None:
        found, included = _USED.search(message), arguments
    if found is None:
        return None
    used, used_unit, limit, limit_unit = found.groups()
    return _bytes(used, used_unit) - included, _bytes(limit, limit_unit)


def _spent(compiled: Any) -> dict[str, Any]:
    memory = compiled.memory_analysis()
    # Outputs that alias donated arguments need no memory of their own.
    fresh = memory.output_size_in_bytes - memory.alias_size_in_bytes
    need = memory.temp_size_in_bytes + memory.argument_size_in_bytes + fresh
    host = memory.host_temp_size_in_bytes + memory.host_argument_size_in_bytes
    return {
        "need_gib": need / GIB,
        "peak_gib": memory.peak_memory_in_bytes / GIB,
        "arguments_gib": memory.argument_size_in_bytes / GIB,
        "temporaries_gib": memory.temp_size_in_bytes / GIB,
        "host_gib": host / GIB,
    }


def _bytes(number: str, unit: str) -> float:
    return float(number) * _UNITS[unit]
