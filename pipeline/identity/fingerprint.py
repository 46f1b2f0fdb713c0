"""Canonical bytes of a step's configuration, and the SHA-256 that names its output.

Two configurations get the same bytes when, and only when, they say the same thing: a dataclass
carries its class, a float is written in hexadecimal (so -0.0 is not 0.0), a tuple is not a list,
the key 1 is not "1". A set and a frozenset of the same members say the same thing, and so do dicts
of the same items in another order. A value whose meaning cannot be written down (NaN, a lambda, an
open file, an array, text that is not Unicode, a structure that contains itself) raises `InputError`
naming the path to it.

What does not change a result is marked `Runtime` in its annotation and left out:

    @dataclass(frozen=True)
    class Example:
        learning_rate: float
        log_every: Annotated[int, Runtime] = 10
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import json
import math
import re
import typing
from typing import Any

from pipeline.errors import InputError

# Deep enough for any configuration; a structure that contains itself ends here.
MAX_DEPTH = 64
# Longer integers go in hexadecimal: Python refuses to read or write them in decimal.
_DECIMAL_BITS = 1024
_BUILTINS = (int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset)


class Runtime:
    """Marker for `Annotated[...]`: this field says where or how to run, never what is computed."""


def is_runtime(annotation: Any) -> bool:
    """Whether an annotation carries the `Runtime` marker.

    Raises:
        InputError: when the marker is inside the annotation, where it would say nothing.
    """
    if any(_marks(argument) for argument in typing.get_args(annotation)):
        raise InputError(
            f"{annotation}: Runtime marks a whole field or argument; write "
            "Annotated[int | None, Runtime], not Annotated[int, Runtime] | None"
        )
    return _is_marked(annotation)


def _is_marked(annotation: Any) -> bool:
    marks = getattr(annotation, "__metadata__", ())
    return any(mark is Runtime or isinstance(mark, Runtime) for mark in marks)


def _marks(annotation: Any) -> bool:
    """Whether the marker is on the annotation or anywhere inside it."""
    # The arguments of Annotated include its marks, which are no annotations with marks themselves.
    return _is_marked(annotation) or any(_marks(a) for a in typing.get_args(annotation))


@functools.cache
def identity_fields(cls: type) -> tuple[str, ...]:
    """Names of a dataclass's fields that belong to its identity, in order of declaration.

    Raises:
        InputError: when an annotation names something that is imported for type checking only.
    """
    try:
        hints = typing.get_type_hints(cls, include_extras=True)
    except NameError as error:
        raise InputError(
            f"{cls.__module__}.{cls.__qualname__}: {error}; an annotation of a configuration must "
            "be importable when it runs, to see whether it is marked Runtime"
        ) from error
    return tuple(f.name for f in dataclasses.fields(cls) if not is_runtime(hints[f.name]))


def canonical(value: Any, path: str = "config") -> Any:
    """`value` as a JSON tree that tells apart everything Python tells apart.

    Raises:
        InputError: naming the path, when a value has no canonical form.
    """
    return _canonical(value, path, 0)


def _canonical(value: Any, path: str, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise InputError(
            f"{path[:60]}...: nested more than {MAX_DEPTH} deep, or contains itself; "
            "make it flatter"
        )
    if value is None or type(value) is bool:
        return value
    if type(value) is int:
        return value if value.bit_length() <= _DECIMAL_BITS else {"int": hex(value)}
    if type(value) is str:
        return _canonical_text(value, path)
    if type(value) is float:
        if math.isnan(value):
            raise InputError(f"{path}: NaN cannot be part of a step's identity; give a number")
        return {"float": value.hex()}
    if type(value) is bytes:
        return {"bytes": value.hex()}
    if isinstance(value, enum.Enum):
        name = _name_of(type(value), path)
        if value.name is None:  # no flag at all, or bits that no flag stands for
            return {"enum": name, "value": _canonical(value.value, path, depth + 1)}
        return {"enum": name, "member": value.name}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _canonical_dataclass(value, path, depth)
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        items = [_canonical(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)]
        return {type(value).__name__: items}
    if isinstance(value, set | frozenset) and type(value) in (set, frozenset):
        members = [_canonical(item, f"{path}{{}}", depth + 1) for item in value]
        return {"set": sorted(members, key=_dumps)}
    if isinstance(value, dict) and type(value) is dict:
        pairs = []
        for key, item in value.items():
            name = _canonical(key, f"{path} key", depth + 1)
            pairs.append([name, _canonical(item, f"{path}[{_dumps(name)}]", depth + 1)])
        return {"dict": sorted(pairs, key=lambda pair: _dumps(pair[0]))}
    raise InputError(
        f"{path}: a value of type {type(value).__module__}.{type(value).__qualname__} cannot be "
        "part of a step's identity; use numbers, strings, tuples, dicts, enums or frozen "
        "dataclasses of these"
    )


def _canonical_text(value: str, path: str) -> str:
    # A pair of surrogates is written in JSON like the one character it stands for in UTF-16.
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise InputError(f"{path}: {value[:40]!a} holds surrogates and is not Unicode text")
    return value


def _canonical_dataclass(value: Any, path: str, depth: int) -> dict[str, Any]:
    if isinstance(value, _BUILTINS):
        raise InputError(
            f"{path}: {type(value).__qualname__} is a dataclass and a builtin type at once, and "
            "only its fields could be part of a step's identity; give it a field instead"
        )
    if not value.__dataclass_params__.frozen:
        raise InputError(
            f"{path}: {type(value).__qualname__} must be @dataclass(frozen=True) to be part of a "
            "step's identity"
        )
    return {
        "class": _name_of(type(value), path),
        "fields": {
            name: _canonical(getattr(value, name), f"{path}.{name}", depth + 1)
            for name in identity_fields(type(value))
        },
    }


def _name_of(cls: type, path: str) -> str:
    if "<locals>" in cls.__qualname__:
        raise InputError(
            f"{path}: {cls.__qualname__} is defined in a function; move it to a module"
        )
    return f"{cls.__module__}.{cls.__qualname__}"


def _dumps(tree: Any) -> str:
    return json.dumps(tree, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def digest(tree: Any) -> str:
    """Hex SHA-256 of a canonical tree's JSON (sorted keys, ASCII, no spaces)."""
    return hashlib.sha256(_dumps(tree).encode("ascii")).hexdigest()


def difference(old: Any, new: Any, path: str = "") -> list[str]:
    """Field-level differences of two canonical trees, as `path: old -> new` lines."""
    if type(old) is dict and type(new) is dict:
        # The wrappers of `canonical` would only lengthen the path a reader sees.
        lines = []
        for key in sorted({*old, *new}):
            inner = (
                path if key in ("fields", "float", "list", "tuple") else f"{path}.{key}".strip(".")
            )
            lines += difference(old.get(key), new.get(key), inner)
        return lines
    if type(old) is list and type(new) is list and len(old) == len(new):
        return [
            line
            for i, (a, b) in enumerate(zip(old, new, strict=True))
            for line in difference(a, b, f"{path}[{i}]")
        ]
    return (
        [] if old == new and type(old) is type(new) else [f"{path}: {_show(old)} -> {_show(new)}"]
    )


def _show(leaf: Any) -> str:
    if isinstance(leaf, str) and re.fullmatch(r"-?0x[01]\.[0-9a-f]+p[+-]\d+", leaf):
        return repr(float.fromhex(leaf))
    text = json.dumps(leaf)
    return text if len(text) <= 60 else text[:57] + "..."
