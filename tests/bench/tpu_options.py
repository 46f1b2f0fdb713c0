"""Flags and programs of the benches that ask the TPU compiler; no TPU is needed.

Flags: `--model` a name of a preset, `--slice` such as v6e-16, 2xv6e-16 or v6e:4x4, `--batch`,
`--seq`, `--remat POLICY` (again for more policies), `--sharding`, and `--set NAME=VALUE` for any
other field of TrainConfig, `--set-model` and `--set-optimizer` for those of the model and the
optimizer; a value is read as JSON where it is JSON. Compiling takes whole cores.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from training.preflight import describe


def parser(about: str) -> argparse.ArgumentParser:
    """The flags above, with the first measured shape as defaults."""
    flags = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("--model", default="tomat_200m")
    flags.add_argument("--slice", default="v6e-16")
    flags.add_argument("--batch", type=int, default=128)
    flags.add_argument("--seq", type=int, default=8192)
    flags.add_argument("--remat", action="append", metavar="POLICY")
    flags.add_argument("--sharding", default="auto", help="auto, replicated, zero1 or fsdp")
    for name in ("--set", "--set-model", "--set-optimizer"):
        flags.add_argument(name, action="append", default=[], metavar="NAME=VALUE", type=setting)
    return flags


def setting(text: str) -> tuple[str, Any]:
    """From "layers=2" to ("layers", 2); what is not JSON stays text."""
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    if value in ("True", "False", "None"):
        raise argparse.ArgumentTypeError(f"expected true, false or null, as in JSON, got {value}")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def make_program(options: argparse.Namespace, **changes: Any) -> Any:
    """The program that the flags describe, with fields of TrainConfig replaced by `changes`.

    A policy of `--remat` is one of `changes`; `parallel` is a mapping of its fields.
    """
    devices = describe(options.slice)
    # After `describe`, which says to JAX where it runs.
    from models.shape import presets
    from training.config import OptimizerConfig, Parallelism, TrainConfig
    from training.step.program import build_program

    model = dataclasses.replace(getattr(presets, options.model), **dict(options.set_model))
    fields = {**dict(options.set), **changes}
    parallel = {"sharding": options.sharding, **fields.pop("parallel", {})}
    train = TrainConfig(
        steps=1000,
        batch_size=options.batch,
        sequence_length=options.seq,
        parallel=Parallelism(**parallel),
        **fields,
    )
    optimizer = OptimizerConfig(**dict(options.set_optimizer))
    return build_program(model, optimizer, train, devices, eos_id=0)


def described(options: argparse.Namespace, program: Any) -> dict[str, Any]:
    """What was asked for, and what the program made of it, for a line of output."""
    from models.shape.footprint import training_flops_per_token
    from training.config import OptimizerConfig
    from training.cost.executed_flops import executed_flops

    train, model = program.train, program.model
    optimizer = OptimizerConfig(**dict(options.set_optimizer))
    executed = executed_flops(model, optimizer, train, program.backend, program.layout.devices)
    asked = training_flops_per_token(model, train.sequence_length, causal=True)
    tokens = train.batch_size * train.sequence_length
    return {
        "model": options.model,
        "changed": {
            **dict(options.set_model),
            **dict(options.set),
            **dict(options.set_optimizer),
        },
        "slice": options.slice,
        "devices": program.layout.devices,
        "batch": train.batch_size,
        "seq": train.sequence_length,
        "remat": train.remat,
        "sharding": train.parallel.sharding,
        "microbatches": train.microbatches,
        "loss_chunks": train.loss_chunks,
        "attention": program.backend,
        "executed_over_model": executed and round(executed / (asked * tokens), 4),
    }
