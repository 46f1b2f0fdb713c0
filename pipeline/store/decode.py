"""Dataclasses from JSON, with every field there, none unknown, and each of its declared type.

Records are read back by this: what was torn, typed by hand or written by another version must not
become an object that fails somewhere else.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


Build = Callable[[Any], Any]


class _Wrong(Exception):
    """What is wrong with a value, and where in it: the innermost place first."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.places: list[str] = []


def build(kind: type[T], tree: Any) -> T:
    """The inverse of `dataclasses.asdict` for frozen dataclasses of JSON types.

    Raises:
        ValueError: naming the first field that is missing, unknown or of another type.
    """
    try:
        return _builder(kind)(tree)
    except _Wrong as wrong:
        where = kind.__name__ + "".join(reversed(wrong.places))
        raise ValueError(f"{where}: {wrong.what}") from None


@functools.cache
def _builder(kind: Any) -> Build:
    """The function that turns JSON into `kind`: made once, for a record has thousands of parts."""
    if kind is Any:
        return lambda value: value
    if dataclasses.is_dataclass(kind):
        return _dataclass(typing.cast(type[Any], kind))
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        (other,) = (_builder(t) for t in arguments if t is not type(None))
        return lambda value: None if value is None else other(value)
    if origin is tuple:
        return _tuple(kind, _builder(arguments[0]))
    if origin is dict:
        return _dict(kind, _builder(arguments[1]))
    allowed = (int, float) if kind is float else (kind,)

    def leaf(value: Any) -> Any:
        if type(value) not in allowed:
            raise _mismatch(kind, value)
        return value

    return leaf


def _dataclass(kind: type[Any]) -> Build:
    hints = typing.get_type_hints(kind)
    fields = {field.name: _builder(hints[field.name]) for field in dataclasses.fields(kind)}

    def make(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _mismatch(kind, value)
        if value.keys() != fields.keys():
            raise _Wrong(f"wrong fields: {sorted(set(value) ^ set(fields))}")
        return kind(**{name: _at(f".{name}", part, value[name]) for name, part in fields.items()})

    return make


def _tuple(kind: Any, part: Build) -> Build:
    def make(value: Any) -> Any:
        if not isinstance(value, list):
            raise _mismatch(kind, value)
        return tuple(_at(i, part, item) for i, item in enumerate(value))

    return make


def _dict(kind: Any, part: Build) -> Build:
    def make(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _mismatch(kind, value)
        return {name: _at(f".{name}", part, item) for name, item in value.items()}

    return make


def _at(place: str | int, part: Build, value: Any) -> Any:
    try:
        return part(value)
    except _Wrong as wrong:
        wrong.places.append(place if isinstance(place, str) else f"[{place}]")
        raise


def _mismatch(kind: Any, value: Any) -> _Wrong:
    name = getattr(kind, "__name__", str(kind))
    return _Wrong(f"expected {name}, got {type(value).__name__}")
