"""Entries of the board: one file each, whose `ENTRY` is a recipe to compare.

A file that is added here is a new entry of `experiments/recipes.py`; the runs of the others are
reused.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from training.config import OptimizerConfig


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A recipe: what it changes of the board's model and training, and its optimizer.

    Attributes:
        optimizer: with the best rates of those tried at 0.25M x 10, see docs/recipes.md.
        model: fields of `TransformerConfig`.
        training: fields of `TrainConfig`.
        public_steps: steps to a loss of 3.28 of the nearest entry of modded-nanogpt's track 3
            (its README of 2026-06), which trains 124M parameters; None where none is near.
    """

    optimizer: OptimizerConfig
    model: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    public_steps: int | None = None


def entries() -> dict[str, Entry]:
    """All entries by the names of their files, in alphabetical order."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return {n.replace("_", "-"): importlib.import_module(f"{__name__}.{n}").ENTRY for n in names}


def scaled(config: Any, factor: float) -> Any:
    """A configuration with every learning rate in it, also of groups, times `factor`."""
    changes = {}
    for each in dataclasses.fields(config):
        value = getattr(config, each.name)
        if dataclasses.is_dataclass(value):
            changes[each.name] = scaled(value, factor)
        elif each.name.endswith("learning_rate") and value is not None:
            changes[each.name] = factor * value
    return dataclasses.replace(config, **changes)
