"""The first hundred losses of the tiny run, which no refactoring may change.

They are in `losses.json` beside this file, as hexadecimal floats, with the jaxlib and the processor
they were computed by. A change that is meant to alter them (initial parameters, loss, optimizer)
writes the file anew and says in its commit why:

    python -m tests.golden.losses
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tests.conftest  # noqa: F401 - the devices of the tests, set before JAX starts

PATH = Path(__file__).with_name("losses.json")
STEPS = 100


def current() -> dict[str, Any]:
    """What the file would hold if it were written now, compiled as the tests compile."""
    import jax
    import jaxlib

    from tests.training import tiny

    jax.config.update("jax_disable_most_optimizations", True)
    program = tiny.program(steps=STEPS)
    state, losses = program.init(), []
    for step in range(STEPS):
        tokens = program.layout.place(tiny.random_tokens(step % 4), tiny.BATCH)
        state, metrics = program.step(state, tokens)
        losses.append(float(metrics["loss"]).hex())
    return {"jaxlib": jaxlib.__version__, "processor": processor(), "losses": losses}


def processor() -> str:
    """Name and generation of the processor, and whether a compiler may use its widest vectors."""
    described = Path("/proc/cpuinfo")
    text = described.read_text() if described.exists() else ""
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    fields = {name.strip(): value.strip() for name, value in fields.items()}
    wide = "avx512f" in fields.get("flags", "").split()
    names = ("model name", "cpu family", "model")
    return ", ".join([*(fields.get(name, "unknown") for name in names), f"avx512 {wide}"])


if __name__ == "__main__":
    PATH.write_text(json.dumps(current(), indent=1) + "\n")
