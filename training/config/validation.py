"""Checks of configuration fields; each raises an `InputError` of one line naming the field."""

from __future__ import annotations

import functools
import math
import types
import typing
from collections.abc import Sequence
from typing import Any

from pipeline.errors import InputError

_NUMBERS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}

TRACKERS = {"tensorboard": "tensorboardX", "wandb": "wandb", "trackio": "trackio"}
"""Tracker name, which is also the name of its extra -> its module; none is imported here."""

INSTALL = "install it with: pip install -e '.[{}]' in the checkout of ponente"
"""The hint when a tracker's module is not installed; formatted with its extra."""


def check_types(config: Any) -> None:
    """Raise unless every field has a value of its type; an int is a float, a list is a tuple.

    Fields of words (`Literal`) are left to other checks, which name the words.
    """
    for name, hint in _hints(type(config)).items():
        value = getattr(config, name)
        if not _fits(value, hint):
            raise InputError(
                f"{type(config).__name__}.{name}: expected {_described(hint)}, got {value!r} of "
                f"type {type(value).__name__}"
            )


@functools.cache
def _hints(owner: type) -> dict[str, Any]:
    # `get_type_hints` resolves `Annotated[int, Runtime]` to int.
    return typing.get_type_hints(owner)


def _fits(value: object, hint: Any) -> bool:
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, part) for part in parts)
    if origin is tuple:
        if not isinstance(value, tuple | list):
            return False
        kinds = parts[:1] * len(value) if parts[-1] is Ellipsis else parts
        return len(value) == len(kinds) and all(map(_fits, value, kinds))
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(hint, type):
        return isinstance(value, hint) and (hint is bool or not isinstance(value, bool))
    return True


def _described(hint: Any) -> str:
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_described(part) for part in parts if part is not type(None))
    if origin is tuple and parts[-1] is not Ellipsis:
        return f"({', '.join(map(_described, parts))})"
    if origin is tuple:
        return f"({_described(parts[0])}, ...)"
    return _NUMBERS.get(hint) or getattr(hint, "__name__", str(hint))


def at_least(owner: str, **fields: tuple[float, float]) -> None:
    """Raise unless every (value, bound) is a finite number with value >= bound."""
    for name, (value, bound) in fields.items():
        if not value >= bound or math.isinf(value):
            raise InputError(f"{owner}.{name}: expected a number >= {bound}, got {value}")


def at_most(owner: str, **fields: tuple[float, float]) -> None:
    """Raise unless every (value, bound) has value <= bound."""
    for name, (value, bound) in fields.items():
        if not value <= bound:
            raise InputError(f"{owner}.{name}: expected a number <= {bound}, got {value}")


def above_zero(owner: str, **fields: float) -> None:
    """Raise unless every value is a number above 0."""
    for name, value in fields.items():
        if not value > 0.0:
            raise InputError(f"{owner}.{name}: expected a number above 0, got {value}")


def fraction(owner: str, **fields: float) -> None:
    """Raise unless every value is from 0 to 1."""
    for name, value in fields.items():
        if not 0.0 <= value <= 1.0:
            raise InputError(f"{owner}.{name}: expected a number from 0 to 1, got {value}")


def below_one(owner: str, **fields: float) -> None:
    """Raise unless every value is from 0 to below 1."""
    for name, value in fields.items():
        if not 0.0 <= value < 1.0:
            raise InputError(f"{owner}.{name}: expected a number from 0 to below 1, got {value}")


def rising(owner: str, name: str, pairs: tuple[tuple[int, int], ...]) -> None:
    """Raise unless the pairs have rising first numbers >= 0 and second numbers >= 1."""
    firsts = [first for first, _ in pairs]
    if any(a >= b for a, b in zip([-1, *firsts], firsts, strict=False)) or any(
        value < 1 for _, value in pairs
    ):
        raise InputError(
            f"{owner}.{name}: expected pairs (steps done, value) with rising steps from 0 and "
            f"values of at least 1, got {pairs}"
        )


def one_of(owner: str, name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise unless the value is one of the allowed words."""
    if value not in allowed:
        raise InputError(f"{owner}.{name}: expected one of {', '.join(allowed)}, got {value!r}")


def count_or(word: str, owner: str, **fields: object) -> None:
    """Raise unless every value is `word` or a whole number >= 1."""
    for name, value in fields.items():
        if value != word and not (type(value) is int and value >= 1):
            raise InputError(
                f'{owner}.{name}: expected "{word}" or a whole number >= 1, got {value!r}'
            )


def check_sequences(sequences: int | None) -> None:
    """Raise `InputError` unless `sequences`, to read of each split, is None (all) or >= 1."""
    if sequences is not None and sequences < 1:
        raise InputError(
            f"sequences: expected at least 1 of each split, found {sequences}; None reads all"
        )


def check_trackers(field: str, names: Sequence[str]) -> None:
    """Raise `InputError` for a name that is not a tracker's, or is given twice."""
    for name in names:
        if name not in TRACKERS or list(names).count(name) > 1:
            raise InputError(
                f"{field}: expected some of {', '.join(TRACKERS)}, each once, "
                f"got {tuple(names)!r}; metrics.jsonl is always written and has no name"
            )
