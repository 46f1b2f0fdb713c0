"""Bounds of configuration fields, stated in their annotations, and the check of them.

@dataclass(frozen=True, kw_only=True)
class Example:
    layers: Count
    kind: Literal["a", "b"] = "a"

    def __post_init__(self) -> None:
        check_fields(self)
"""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from pipeline.errors import InputError

_FINITE = sys.float_info.max
Count = Annotated[int, Meta(ge=1)]
Whole = Annotated[int, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0.0, le=_FINITE)]
NotNegative = Annotated[float, Meta(ge=0.0, le=_FINITE)]
AtLeastOne = Annotated[float, Meta(ge=1.0, le=_FINITE)]
BelowOne = Annotated[float, Meta(ge=0.0, lt=1.0)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Seed = Annotated[int, Meta(ge=0, lt=2**32)]  # JAX uses the lowest 32 bits

T = TypeVar("T")


def check_fields(config: object) -> None:
    """Raise `InputError` unless every field of a dataclass has a value of its annotated type.

    An int is a float, and a list a tuple. The values stay as they are.
    """
    owner = type(config)
    for name, hint in _hints(owner).items():
        value = getattr(config, name)
        if type(value) in (int, float, bool, str, type(None)):
            _check_once(owner, name, value)
        else:
            check_value(f"{owner.__name__}.{name}", value, hint)


@functools.lru_cache(4096, typed=True)  # 1 is not True here
def _check_once(owner: type, name: str, value: object) -> None:
    """The check of a field, whose value planning sees thousands of times."""
    check_value(f"{owner.__name__}.{name}", value, _hints(owner)[name])


def check_value(name: str, value: object, hint: Any) -> None:
    """Raise `InputError`, with the name, the value and the bound, unless it is of type `hint`."""
    classes, words = _parts(hint)
    if classes and isinstance(value, (*classes, type(None)) if "None" in str(hint) else classes):
        return  # checked when it was made
    # msgspec makes no union of these, and takes a mapping for one of them.
    if len(classes) > 1 or (classes and isinstance(value, Mapping)):
        expected = " or ".join(each.__name__ for each in classes)
        raise InputError(f"{name}: expected {expected}, found {value!r}")
    plain = float(value) if isinstance(value, float) else value  # also NumPy's
    try:
        msgspec.convert(plain, hint)
    except msgspec.ValidationError as error:
        expected = str(error)
        if expected.startswith("Invalid enum value"):
            expected = f"Expected one of {', '.join(words)}" + " or int" * ("[int" in str(hint))
        elif classes and "`object" in expected:
            expected = f"Expected {' or '.join(each.__name__ for each in classes)}"
        # Without the type that was found, as the value is shown: "Expected `int`, got `str`".
        expected = re.sub(r", got `.*?`", "", expected).replace("`", "")
        for old, new in (("array", "tuple"), (" | null", " or None"), (f"<= {_FINITE}", "< inf")):
            expected = expected.replace(old, new)
        raise InputError(f"{name}: {expected[0].lower()}{expected[1:]}, found {value!r}") from None


def from_plain(kind: type[T], fields: Mapping[str, Any]) -> T:
    """The dataclass of a `dataclasses.asdict` dictionary, also after a round trip through JSON."""
    hints, values = _hints(kind), {}
    if unknown := fields.keys() - hints.keys():
        raise InputError(f"{kind.__name__}: unknown fields {', '.join(sorted(unknown))}")
    for name, value in fields.items():
        if isinstance(value, Mapping):  # it does not name its class
            possible = _parts(hints[name])[0]
            nested = [each for each in possible if value.keys() <= _hints(each).keys()]
            value = from_plain(nested[0], value) if nested else value
        elif not _parts(hints[name])[0]:
            value = msgspec.convert(value, hints[name])
        values[name] = value
    return kind(**values)


def at_least(owner: str, **fields: tuple[float, float]) -> None:
    """Raise `InputError` unless every (value, bound) is a finite number >= bound."""
    for name, (value, bound) in fields.items():
        if not bound <= value <= _FINITE:
            raise InputError(f"{owner}.{name}: expected a number >= {bound}, found {value}")


@functools.cache
def _hints(owner: type) -> dict[str, Any]:
    return typing.get_type_hints(owner, include_extras=True)


@functools.cache
def _parts(hint: Any) -> tuple[tuple[type, ...], tuple[str, ...]]:
    """The dataclasses and the words among the alternatives of a type."""
    if typing.get_origin(hint) is Annotated:
        hint = typing.get_args(hint)[0]
    if typing.get_origin(hint) is Literal:
        return (), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return (hint,), ()
    if typing.get_origin(hint) is tuple:
        return (), _parts(typing.get_args(hint)[0])[1]
    found = [_parts(part) for part in typing.get_args(hint)]
    return sum((classes for classes, _ in found), ()), sum((words for _, words in found), ())
