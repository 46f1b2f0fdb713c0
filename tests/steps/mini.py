"""The main job shrunk to seconds: the real graph of the 200M experiment on a tiny model."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from experiments.run_200m import experiment
from pipeline import Experiment

SMOKE = experiment.presets["smoke"]
MINI = dataclasses.replace(
    SMOKE,
    train_tokens=80_000,
    validation_tokens=8_000,
    length=64,
    model=dataclasses.replace(
        SMOKE.model, vocab_size=512, layers=2, embed=32, heads=2, kv_heads=1, head_size=16, mlp=48
    ),
    training=dataclasses.replace(SMOKE.training, steps=8, evaluate_every=4, checkpoint_every=4),
)


def plain(settings: Any) -> dict[str, Any]:
    """Resolved settings as keywords."""
    return {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}


def run(store: str, *arguments: str, settings: Any = MINI) -> int:
    """The experiment's command line in this process; its exit status."""
    flags = [*arguments, "--mini", "--prefix", store, "--executor", "inline"]
    with pytest.raises(SystemExit) as stop:
        Experiment(experiment.function, mini=plain(settings)).main(flags)
    return int(stop.value.code or 0)
