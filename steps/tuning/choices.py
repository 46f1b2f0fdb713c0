"""Convert a plan to flags of its experiment."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from models.shape.config import TransformerConfig
from steps.training.plan.declared_run import DeclaredRun
from steps.tuning.candidates import MODEL
from steps.tuning.search import Plan
from training.config import TrainConfig

_TRAIN = ("batch_size", "microbatches", "remat")
_PARALLEL = ("sharding", "sequence", "tensor")
_MODEL = ("heads", "kv_heads", "head_size")


def flags(plan: Plan, run: DeclaredRun, settings: Any) -> list[str]:
    """The command-line words that change the declared run to the plan: --flag, value, ...

    Args:
        settings: settings of the experiment; flags are named after their fields.
    """
    return [
        word
        for name, value in _differences(plan, run, settings)
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]


def _differences(plan: Plan, run: DeclaredRun, settings: Any) -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of every setting that differs from the declared run."""
    training = _field(settings, TrainConfig) or "training"
    model = _field(settings, TransformerConfig) or "model"
    new, old = plan.fit.train, run.train
    for name in _TRAIN:
        if getattr(new, name) != getattr(old, name):
            yield f"{training}.{name}", getattr(new, name)
    for name in _PARALLEL:
        if getattr(new.parallel, name) != getattr(old.parallel, name):
            yield f"{training}.parallel.{name}", getattr(new.parallel, name)
    if new.parallel.optimizer_memory == "host" != old.parallel.optimizer_memory:
        yield f"{training}.parallel.optimizer_memory", "host"
    if plan.candidate.changes == MODEL:
        for name in _MODEL:
            if getattr(plan.candidate.model, name) != getattr(run.model, name):
                yield f"{model}.{name}", getattr(plan.candidate.model, name)


def _field(settings: Any, kind: type) -> str | None:
    """Name of the only setting of a type; None if there are none or several."""
    names = [
        field.name
        for field in dataclasses.fields(settings)
        if isinstance(getattr(settings, field.name), kind)
    ]
    return names[0] if len(names) == 1 else None
