"""Which fields of a model's shape may change for trained parameters; imports no JAX."""

from __future__ import annotations

import dataclasses

from models.shape.config import TransformerConfig
from pipeline.errors import InputError

CHANGEABLE = (
    "window_pattern",
    "window",
    "rope_base",
    "rope_scaling",
    "norm_epsilon",
    "logit_soft_cap",
    "attention_soft_cap",
)
"""Fields of `TransformerConfig` that may change for trained parameters; no array depends on one."""


def check_same_parameters(old: TransformerConfig, new: TransformerConfig) -> None:
    """Refuse to continue a model's parameters as another model than `CHANGEABLE` allows."""
    changed = [
        f"{field.name} {getattr(old, field.name)!r} -> {getattr(new, field.name)!r}"
        for field in dataclasses.fields(old)
        if field.name not in CHANGEABLE and getattr(old, field.name) != getattr(new, field.name)
    ]
    if changed:
        raise InputError(
            f"model: {', '.join(changed)}: trained parameters keep their arrays and their use; "
            f"expected changes of {', '.join(CHANGEABLE)} only"
        )
