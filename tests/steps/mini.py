"""The main job shrunk to seconds: the real graph of the 200M experiment on a tiny model."""

from __future__ import annotations

import dataclasses

import pytest

from experiments.run_200m import SMOKE, Settings, graph
from pipeline.cli import main

MINI = dataclasses.replace(
    SMOKE,
    tokenizer_tokens=100_000,
    tokens=80_000,
    validation_tokens=8_000,
    model=dataclasses.replace(
        SMOKE.model, vocab_size=512, layers=2, embed=32, heads=2, kv_heads=1, head_size=16, mlp=48
    ),
    train=dataclasses.replace(
        SMOKE.train, steps=8, sequence_length=64, evaluate_every=4, checkpoint_every=4
    ),
)


def run(store: str, *arguments: str, settings: Settings = MINI) -> int:
    """The experiment's command line in this process; its exit status."""
    flags = [*arguments, "--prefix", store, "--executor", "inline"]
    with pytest.raises(SystemExit) as stop:
        main(graph, {"mini": settings}, flags)
    return int(stop.value.code or 0)
