"""Dataclasses from JSON by msgspec, with every field there, none unknown, each of its type.

Records are read back by this: what was torn, typed by hand or written by another version must not
become an object that fails somewhere else.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")


def decode(kind: type[T], tree: Any) -> T:
    """The inverse of `msgspec.to_builtins` for frozen dataclasses of JSON types.

    Raises:
        ValueError: naming a field that is missing, unknown, of another type or out of range.
    """
    try:
        value = msgspec.convert(tree, kind)
    except (msgspec.ValidationError, OverflowError, RecursionError) as error:
        raise ValueError(f"{kind.__name__}: {error}") from None
    _check_fields(tree, value, kind.__name__)
    return value


def _check_fields(tree: Any, value: Any, at: str) -> None:
    """Raises `ValueError` for what msgspec lets a dataclass have: fields unknown, or left out."""
    if isinstance(value, tuple):
        for index, item in enumerate(value):
            _check_fields(tree[index], item, f"{at}[{index}]")
    elif names := _field_names(type(value)):
        if tree.keys() != names:
            raise ValueError(f"{at}: wrong fields: {sorted(tree.keys() ^ names)}")
        for name in names:
            _check_fields(tree[name], getattr(value, name), f"{at}.{name}")


@functools.cache
def _field_names(kind: type) -> frozenset[str]:
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    return frozenset(field.name for field in fields)
