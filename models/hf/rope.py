"""Rotary positions in a config.json, in the form of `transformers` 5 and in the older one.

Version 5 has one object, `rope_parameters`; older versions have `rope_theta` and `rope_scaling`. We
write both forms. A file with both must have equal values, because `transformers` reads the older
form.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.config import RopeScaling, TransformerConfig, YarnScaling
from models.hf.keys import Keys
from pipeline.errors import InputError

_BASE = 10_000.0
_LLAMA3 = {
    "factor": "factor",
    "low_freq_factor": "low_frequency_factor",
    "high_freq_factor": "high_frequency_factor",
    "original_max_position_embeddings": "original_context",
}
_YARN = {
    "factor": "factor",
    "original_max_position_embeddings": "original_context",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "attention_factor": "temperature",
}


def write(config: TransformerConfig) -> dict[str, Any]:
    """The rotary keys of config.json."""
    scaling = config.rope_scaling
    if scaling is None:
        old, kind = None, {"rope_type": "default"}
    else:
        names, rope_type = (
            (_YARN, "yarn") if isinstance(scaling, YarnScaling) else (_LLAMA3, "llama3")
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


def read(keys: Keys) -> tuple[float, RopeScaling | YarnScaling | None]:
    """Base and scaling of the rotary frequencies.

    Raises:
        InputError: an unsupported kind of scaling, or a missing setting of a supported one.
    """
    base = keys.number("rope_theta", _BASE)
    old, new = keys.get("rope_scaling", {}), keys.get("rope_parameters", {})
    keys.expect("partial_rotary_factor", 1.0, 1)
    original = keys.get("original_max_position_embeddings")
    found: Mapping[str, Any] = new or old
    if not isinstance(found, Mapping) or any(isinstance(v, Mapping) for v in found.values()):
        raise InputError(
            f"config.json: rope_parameters: expected one set of settings for all layers, found "
            f"{found!r:.200}"
        )
    if old and new and _settings(old) != _settings(new):
        raise InputError(
            f"config.json: rope_scaling {old!r:.200} and rope_parameters {new!r:.200} disagree; "
            "leave one out"
        )
    inner = Keys(found)
    base = inner.number("rope_theta", base)
    kind = inner.get("rope_type") or inner.get("type", "default")
    inner.get("type")
    inner.expect("partial_rotary_factor", 1.0, 1)
    names = {"default": {}, "llama3": _LLAMA3, "yarn": _YARN}.get(str(kind))
    if names is None:
        raise InputError(
            f"config.json: rope_type {kind!r:.80} is unknown here; known are default, llama3 "
            "and yarn"
        )
    if not names:
        inner.finish()
        return base, None
    if kind == "yarn":
        inner.expect("truncate", True)
    given: dict[str, Any] = {
        ours: inner.number(theirs)
        for theirs, ours in names.items()
        if inner.get(theirs) is not None
    }
    if "original_context" in given:
        given["original_context"] = inner.count("original_max_position_embeddings")
    elif original is not None:
        given["original_context"] = keys.count("original_max_position_embeddings")
    inner.finish()
    if missing := {"factor", "original_context"} - given.keys():
        theirs = next(t for t, ours in names.items() if ours in missing)
        raise InputError(f"config.json: rope_type {kind!r}: expected {theirs}, found none")
    return base, (YarnScaling if kind == "yarn" else RopeScaling)(**given)


def _settings(found: Any) -> Any:
    """The settings without the base, and with "rope_type" as the only name of the kind."""
    if not isinstance(found, Mapping):
        return found
    kind = found.get("rope_type") or found.get("type", "default")
    rest = {k: v for k, v in found.items() if k not in ("rope_theta", "rope_type", "type")}
    return {"rope_type": kind, **rest}
