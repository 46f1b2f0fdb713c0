"""Compiles a train step with the TPU compiler before a slice is requested.

    program = build_program(model, optimizer, train, describe("v6e-16"), eos_id=0)
    preflight(program).fits

The compiler refuses a program that does not fit within seconds; one that fits takes as long to
compile as on the slice itself.
"""

from __future__ import annotations

import importlib.metadata
import math
import re
import time
from dataclasses import dataclass
from typing import Any

import jax

from models.flops import training_flops_per_token
from pipeline.accelerators import chip_of
from training.cost.executed_flops import window_share
from training.cost.hlo_cost import Cost, cost
from training.cost.hlo_parser import parse
from training.cost.jaxpr_cost import traced_cost
from training.step.program import Program

GIB = 2**30
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"([\d.]+)([KMGT]?)B?"
_TEMPORARIES = re.compile(rf"HLO temporaries \({_SIZE}\) exceeds available HBM \({_SIZE}\)")
_USED = re.compile(rf"Used {_SIZE} of {_SIZE} hbm")


@dataclass(frozen=True)
class Refusal:
    """Sizes in the compiler's error for a program that does not fit, bytes on one device.

    Attributes:
        temporaries: memory of intermediates alone; None when only the total is known.
        used: total memory; None when only the temporaries are known.
        limit: memory that a program may use.
    """

    temporaries: float | None
    used: float | None
    limit: float


@dataclass(frozen=True)
class Preflight:
    """The compiler's verdict on a train step; sizes in GiB and FLOPs are those of one device.

    Attributes:
        fits: whether it compiled.
        limit_gib: memory that a program may use; None for a device whose limit is unknown.
        need_gib: arguments and temporaries; outputs reuse the donated arguments. The compiler
            overlaps temporaries with dead arguments, so a program that fits may use less.
        peak_gib: peak memory in use, the program's code included; None when it does not fit.
        arguments_gib: state and batch.
        temporaries_gib: intermediates, without those offloaded to the host.
        host_gib: host memory; None when it does not fit.
        compile_seconds: wall time of the compiler.
        model_flops: forward and backward pass, attention counted causally, nothing recomputed.
        model_flops_full: the same with attention over the full square.
        window_share: share of a causal mask's pairs that the model's windows keep.
        cost: operations of a step; its attention kernels count the pairs of a causal mask.
        estimate_gib: estimate of `training.cost.memory_estimate` by content; compare its sum with
            `need_gib`.
        versions: versions of jax and libtpu.
    """

    fits: bool
    limit_gib: float | None
    need_gib: float
    peak_gib: float | None
    arguments_gib: float
    temporaries_gib: float
    host_gib: float | None
    compile_seconds: float
    model_flops: float
    model_flops_full: float
    window_share: float
    cost: Cost
    estimate_gib: dict[str, float]
    versions: dict[str, str | None]

    @property
    def executed_over_model(self) -> float:
        """FLOPs of matmuls and attention kernels over `model_flops`.

        Attention's backward pass recomputes the scores, which the model's FLOPs do not count, so
        the ratio is above 1 even when nothing else is recomputed.
        """
        kernels = self.cost.attention_flops * self.window_share
        return (self.cost.matmul_flops + kernels) / self.model_flops


def preflight(program: Program) -> Preflight:
    """Compile the train step of `program` for its devices and report its memory and FLOPs.

    Compiler errors other than too little device memory propagate.
    """
    lowered = program.lower()
    started = time.perf_counter()
    refusal: Refusal | None = None
    compiled: Any = None
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        refusal = parse_refusal(str(error))
        if refusal is None:
            raise
    seconds = time.perf_counter() - started
    chip = chip_of(program.layout.mesh.devices.flat[0].device_kind)
    known = chip.usable if chip is not None else None
    arguments = argument_bytes(program)
    if refusal is not None:
        spent = _spent_when_refused(refusal, arguments)
        counted = trace(program)
    else:
        spent = _spent(compiled)
        counted = cost(parse(compiled.as_text()))
    devices, train = program.layout.devices, program.train
    tokens = train.batch_size * train.sequence_length / devices
    causal, full = (
        tokens * training_flops_per_token(program.model, train.sequence_length, causal=causal)
        for causal in (True, False)
    )
    limit = known if refusal is None else refusal.limit
    return Preflight(
        fits=refusal is None,
        limit_gib=None if limit is None else limit / GIB,
        **spent,
        compile_seconds=seconds,
        model_flops=causal,
        model_flops_full=full,
        window_share=window_share(program.model, train.sequence_length),
        cost=counted,
        estimate_gib={name: size / GIB for name, size in program.estimate.parts.items()},
        versions=versions(),
    )


def trace(program: Program) -> Cost:
    """Cost of one step on one device, without compiling; see `training.cost.jaxpr_cost`."""
    traced = program.step.trace(program.abstract, program.abstract_batch())
    return traced_cost(traced.jaxpr, program.layout.devices)


def argument_bytes(program: Program) -> int:
    """Bytes of state and batch on one device, without the padding of tiles."""
    leaves = jax.tree.leaves((program.abstract, program.abstract_batch()))
    return sum(
        leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in leaves
    )


def parse_refusal(message: str) -> Refusal | None:
    """The sizes in a compiler message; None unless it is an out-of-memory error with sizes."""
    if "RESOURCE_EXHAUSTED" not in message:
        return None
    if found := _TEMPORARIES.search(message):
        return Refusal(_bytes(*found.groups()[:2]), None, _bytes(*found.groups()[2:]))
    if found := _USED.search(message):
        return Refusal(None, _bytes(*found.groups()[:2]), _bytes(*found.groups()[2:]))
    return None


def versions() -> dict[str, str | None]:
    """Versions of jax and libtpu; None for one that is not installed."""
    found: dict[str, str | None] = {}
    for name in ("jax", "libtpu"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def _spent_when_refused(refusal: Refusal, arguments: int) -> dict[str, Any]:
    if refusal.temporaries is None:
        used = refusal.used or 0.0
        temporaries = used - arguments
    else:
        temporaries = refusal.temporaries
        used = temporaries + arguments
    return {
        "need_gib": used / GIB,
        "peak_gib": None,
        "arguments_gib": arguments / GIB,
        "temporaries_gib": temporaries / GIB,
        "host_gib": None,
    }


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
