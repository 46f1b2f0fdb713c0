"""The trackers that can get the rows of `metrics.jsonl`; imports none of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from models.shape.validation import check_value
from pipeline.errors import InputError

Tracker = Literal["tensorboard", "wandb", "trackio"]
TRACKERS = {"tensorboard": "tensorboardX", "wandb": "wandb", "trackio": "trackio"}
"""Tracker name, which is also the name of its extra -> its module."""

INSTALL = "install it with: pip install -e '.[{}]' in the checkout of ponente"
"""The hint when a tracker's module is not installed; formatted with its extra."""


def check_trackers(field: str, names: Sequence[str]) -> None:
    """Raise `InputError` for a name that is not a tracker's, or is given twice."""
    check_value(field, tuple(names), tuple[Tracker, ...])
    if len({*names}) < len(names):
        raise InputError(f"{field}: expected each tracker once, found {tuple(names)!r}")
