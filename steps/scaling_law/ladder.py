"""A ladder of runs for a scaling law: each model size trained for each budget of FLOPs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

from models.shape.config import TransformerConfig
from models.shape.footprint import training_flops_per_token
from pipeline import Artifact, InputError, sweep
from steps.scaling_law.points import short

A = TypeVar("A", bound=Artifact)


def ladder(
    build: Callable[[TransformerConfig, int], A],
    models: Sequence[TransformerConfig],
    *,
    flops: Sequence[float],
    length: int,
) -> tuple[A, ...]:
    """The outputs of `build(model, tokens)` for every model and budget, labelled with both.

        runs = ladder(rung, models, flops=(1e17, 4e17), length=2048)

    Args:
        build: declares the training of a model on a number of tokens, for example with
            `train(..., tokens=tokens)`, which rounds them down to whole batches. It also chooses
            the settings that depend on the size (learning rate, batch).
    """
    rungs: dict[str, tuple[TransformerConfig, int]] = {}
    for model in models:
        for budget in flops:
            name = f"{short(model.parameter_count)} by {budget:.3g} FLOPs"
            if name in rungs:
                raise InputError(f"ladder: two runs of {name}; give each size and budget once")
            tokens = budget / training_flops_per_token(model, length, causal=True)
            if not length <= tokens < math.inf:
                raise InputError(
                    f"ladder: {name} are {tokens:.0f} tokens, expected at least one sequence of "
                    f"{length}; raise the FLOPs"
                )
            rungs[name] = (model, int(tokens))

    def declare(rung: tuple[TransformerConfig, int]) -> A:
        return build(*rung)

    return sweep(declare, rungs)
