"""Rotary positions in a config.json, in the form of `transformers` 5 and in the older one.

Version 5 has one object, `rope_parameters`; older versions have `rope_theta` and `rope_scaling`. We
write both forms. A file with both must mean the same by either, since programs differ in which
they read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.hf.keys import Keys
from models.shape.config import RopeScaling, TransformerConfig, YarnScaling
from pipeline.errors import InputError

_BASE = 10_000.0
LLAMA3 = {
    "factor": "factor",
    "low_freq_factor": "low_frequency_factor",
    "high_freq_factor": "high_frequency_factor",
    "original_max_position_embeddings": "original_context",
}
YARN = {
    "factor": "factor",
    "original_max_position_embeddings": "original_context",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "attention_factor": "temperature",
}
_OPTIONAL = ("beta_fast", "beta_slow", "attention_factor")


def write(config: TransformerConfig) -> dict[str, Any]:
    """The rotary keys of config.json."""
    scaling = config.rope_scaling
    if scaling is None:
        old, kind = None, {"rope_type": "default"}
    else:
        names, rope_type = (
            (YARN, "yarn") if isinstance(scaling, YarnScaling) else (LLAMA3, "llama3")
        )
        values = {theirs: getattr(scaling, ours) for theirs, ours in names.items()}
        old = kind = {
            "rope_type": rope_type,
            **{name: value for name, value in values.items() if value is not None},
        }
    base = config.rope_base
    return {
        "rope_parameters": {**kind, "rope_theta": base},
        "rope_theta": base,
        "rope_scaling": old,
    }


def read(keys: Keys, positions: int) -> tuple[float, RopeScaling | YarnScaling | None]:
    """Base and scaling of the rotary frequencies; `positions` is the default original context."""
    base = keys.number("rope_theta", _BASE, above=0)
    keys.expect("partial_rotary_factor", 1.0, 1)
    original = keys.count("original_max_position_embeddings", positions)
    given = {name: keys.get(name) for name in ("rope_scaling", "rope_parameters")}
    found = {
        name: _read(keys, name, settings, base, original)
        for name, settings in given.items()
        if settings
    } or {"rope_theta": (base, None)}
    first, *others = found.values()
    if others and others != [first]:
        raise InputError(
            f"config.json: rope_scaling {given['rope_scaling']!r:.200} and rope_parameters "
            f"{given['rope_parameters']!r:.200} disagree; leave one out"
        )
    return first


def _read(
    keys: Keys, name: str, found: Any, base: float, original: int
) -> tuple[float, RopeScaling | YarnScaling | None]:
    if not isinstance(found, Mapping) or any(isinstance(v, Mapping) for v in found.values()):
        raise InputError(
            f"config.json: {name}: expected one set of settings for all layers, found "
            f"{found!r:.200}"
        )
    inner = keys.inside(found)
    old_kind = inner.get("type", "default")
    kind = inner.get("rope_type", old_kind)
    # YaRN's boundaries are logarithms to the base.
    base = inner.number("rope_theta", base, above=1 if kind == "yarn" else 0)
    inner.expect("partial_rotary_factor", 1.0, 1)
    names = {"default": {}, "llama3": LLAMA3, "yarn": YARN}.get(str(kind))
    if names is None:
        raise InputError(
            f"config.json: rope_type {kind!r:.80} is unknown here; known are default, llama3 "
            "and yarn"
        )
    if kind == "yarn":
        inner.expect("truncate", True)
    given: dict[str, Any] = {
        ours: inner.number(theirs)
        for theirs, ours in names.items()
        if inner.get(theirs) is not None
    }
    if names:
        context = inner.count("original_max_position_embeddings", original)
        # Beside the object it has priority in `transformers`.
        given["original_context"] = keys.count("original_max_position_embeddings", context)
    inner.finish()
    for theirs, ours in names.items():
        if ours not in given and theirs not in _OPTIONAL:
            raise InputError(f"config.json: rope_type {kind!r}: expected {theirs}, found none")
    if not names:
        return base, None
    return base, (YarnScaling if kind == "yarn" else RopeScaling)(**given)
