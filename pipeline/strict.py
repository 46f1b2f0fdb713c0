"""Dataclasses from JSON, with every field there, none unknown, and each of its declared type.

Records are read back by this: what was torn, typed by hand or written by another version must not
become an object that fails somewhere else.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from typing import Any, TypeVar

T = TypeVar("T")


def build(kind: type[T], tree: Any) -> T:
    """The inverse of `dataclasses.asdict` for frozen dataclasses of JSON types.

    Raises:
        ValueError: naming the first field that is missing, unknown or of another type.
    """
    return _build(kind, tree, kind.__name__)


@functools.cache
def _fields(kind: type[Any]) -> dict[str, Any]:
    return {f.name: typing.get_type_hints(kind)[f.name] for f in dataclasses.fields(kind)}


def _build(kind: Any, value: Any, where: str) -> Any:
    if kind is Any:
        return value
    if dataclasses.is_dataclass(kind):
        fields = _fields(typing.cast(type[Any], kind))
        _expect(isinstance(value, dict), kind, value, where)
        if set(value) != set(fields):
            raise ValueError(f"{where}: wrong fields: {sorted(set(value) ^ set(fields))}")
        return kind(**{n: _build(t, value[n], f"{where}.{n}") for n, t in fields.items()})
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        (other,) = [t for t in arguments if t is not type(None)]
        return None if value is None else _build(other, value, where)
    if origin is tuple:
        _expect(isinstance(value, list), kind, value, where)
        return tuple(_build(arguments[0], v, f"{where}[{i}]") for i, v in enumerate(value))
    if origin is dict:
        _expect(isinstance(value, dict), kind, value, where)
        return {name: _build(arguments[1], v, f"{where}.{name}") for name, v in value.items()}
    allowed = (int, float) if kind is float else (kind,)
    _expect(type(value) in allowed, kind, value, where)
    return value


def _expect(right: bool, kind: Any, value: Any, where: str) -> None:
    if not right:
        name = getattr(kind, "__name__", str(kind))
        raise ValueError(f"{where}: expected {name}, got {type(value).__name__}")
