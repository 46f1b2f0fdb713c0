"""A plan as flags of its experiment."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from models.config import TransformerConfig
from steps.planning.declared_run import DeclaredRun
from steps.tuning.candidates import MODEL
from steps.tuning.search import Plan
from training.config import TrainConfig

_TRAIN = ("batch_size", "microbatches", "remat")
_PARALLEL = ("sharding", "sequence", "tensor")
_MODEL = ("heads", "kv_heads", "head_size")


def flags(plan: Plan, run: DeclaredRun, settings: Any) -> list[str]:
    """The flags that make the declared run the plan; one word each, and one for each value.

    Args:
        plan: of the run.
        run: as it is declared.
        settings: of the experiment, whose fields the flags are named after.
    """
    return [
        word
        for name, value in _differences(plan, run, settings)
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]


def _differences(plan: Plan, run: DeclaredRun, settings: Any) -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of what differs from the declared run."""
    training, model = (_field(settings, kind) for kind in (TrainConfig, TransformerConfig))
    new, old = plan.fit.train, run.train
    for name in _TRAIN:
        if getattr(new, name) != getattr(old, name):
            yield f"{training or 'training'}.{name}", getattr(new, name)
    for name in _PARALLEL:
        if getattr(new.parallel, name) != getattr(old.parallel, name):
            yield f"{training or 'training'}.parallel.{name}", getattr(new.parallel, name)
    if new.parallel.optimizer_memory == "host" != old.parallel.optimizer_memory:
        yield f"{training or 'training'}.parallel.optimizer_memory", "host"
    if plan.candidate.changes == MODEL:
        for name in _MODEL:
            if getattr(plan.candidate.model, name) != getattr(run.model, name):
                yield f"{model or 'model'}.{name}", getattr(plan.candidate.model, name)


def _field(settings: Any, kind: type) -> str | None:
    """Name of the one setting that is of a kind; None where there is not just one."""
    names = [
        field.name
        for field in dataclasses.fields(settings)
        if isinstance(getattr(settings, field.name), kind)
    ]
    return names[0] if len(names) == 1 else None
