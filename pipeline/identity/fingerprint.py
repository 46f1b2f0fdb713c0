"""Canonical form of a step's configuration, its digest, and the differences between two of them.

Two configurations have the same form if and only if they are equal in type and value: -0.0 is not
0.0, a tuple is not a list, the key 1 is not "1"; a set equals a frozenset of the same members, and
dicts are equal in any order. A value without a canonical form (NaN, a lambda, an array, text that
looks like a secret) raises `InputError` with the path to it. What does not change a result is
marked `Runtime` in its annotation and left out: `log_every: Annotated[int, Runtime] = 10`.

A class is identified by its name without its module, or by `identity_name: ClassVar[str]`. The
fields of a configuration are in two groups: "defaults" has those with their default value, "fields"
all others. Keys are digests of the tree `without_defaults`, so a field added with a default changes
no key until it gets another value; `difference` compares both groups, so it sees a changed default.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import json
import math
import os
import re
import sys
import types
import typing
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from pipeline.errors import InputError
from pipeline.identity.secret_text import REMEDY, SECRET

# Deep enough for any configuration; stops at a structure that contains itself.
MAX_DEPTH = 64
# Longer integers are written in hexadecimal: Python limits the length of decimal conversions.
_DECIMAL_BITS = 1024
# Classes and functions of configurations by their name in keys.
Classes = dict[str, Any]
_BUILTINS = (int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset)


class Runtime:
    """Marker for `Annotated[...]`: the field sets where or how to run, never what is computed."""


def is_runtime(annotation: Any) -> bool:
    """Whether an annotation carries the `Runtime` marker; `InputError` for one inside it."""
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
    # `get_args` of Annotated also returns its metadata, which has no metadata of its own.
    return _is_marked(annotation) or any(_marks(a) for a in typing.get_args(annotation))


@functools.cache
def identity_fields(cls: type) -> tuple[str, ...]:
    try:
        hints = typing.get_type_hints(cls, include_extras=True)
    except NameError as error:
        raise InputError(
            f"{cls.__module__}.{cls.__qualname__}: {error}; an annotation of a configuration must "
            "be importable when it runs, to see whether it is marked Runtime"
        ) from error
    return tuple(f.name for f in dataclasses.fields(cls) if not is_runtime(hints[f.name]))


def canonical(value: Any, path: str = "config", classes: Classes | None = None) -> Any:
    """`value` as a JSON tree that distinguishes types and values as Python does.

    `path` leads to the value, for messages; the classes in it are added to `classes`, by name.
    """
    return _canonical(value, path, 0, {} if classes is None else classes)


def group_fields(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Canonical values by name in two groups: "defaults" equal their default, "fields" do not."""
    kept = {n: tree for n, tree in values.items() if not same(tree, defaults.get(n, _ABSENT))}
    return {"fields": kept, "defaults": {n: t for n, t in values.items() if n not in kept}}


def same(a: Any, b: Any) -> bool:
    """Whether two canonical trees are equal in type and value; in Python, True equals 1."""
    return a is b or (a == b and (repr(a) == repr(b) or _dumps(a) == _dumps(b)))


def without_defaults(tree: Any) -> Any:
    """A canonical tree without the fields that have their default value; the input of digests."""
    if isinstance(tree, dict):
        at_default = "defaults" if _is_config(tree) else None
        return {name: without_defaults(t) for name, t in tree.items() if name != at_default}
    return [without_defaults(item) for item in tree] if isinstance(tree, list) else tree


def without_fields(config: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {
        group: {n: t for n, t in config.get(group, {}).items() if n not in names}
        for group in ("fields", "defaults")
    }


def merge_classes(found: Iterable[Classes], path: str) -> None:
    merged: Classes = {}
    for classes in found:
        for name, cls in classes.items():
            _register(merged, name, cls, path)


def _canonical(value: Any, path: str, depth: int, classes: Classes) -> Any:
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
        name = _name_of(type(value), path, classes)
        if value.name is None:  # an enum.Flag without any bit, or with unnamed bits
            return {"enum": name, "value": _canonical(value.value, path, depth + 1, classes)}
        return {"enum": name, "member": value.name}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _canonical_dataclass(value, path, depth, classes)
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        items = [
            _canonical(item, f"{path}[{i}]", depth + 1, classes) for i, item in enumerate(value)
        ]
        return {type(value).__name__: items}
    if isinstance(value, set | frozenset) and type(value) in (set, frozenset):
        members = [_canonical(item, f"{path}{{}}", depth + 1, classes) for item in value]
        return {"set": sorted(members, key=_order)}
    if isinstance(value, types.FunctionType | functools.partial):
        return _canonical_function(value, path, depth, classes)
    if isinstance(value, dict) and type(value) is dict:
        pairs = []
        for key, item in value.items():
            name = _canonical(key, f"{path} key", depth + 1, classes)
            inner = f"{path}[{_dumps(name)}]"
            pairs.append([name, _canonical(item, inner, depth + 1, classes)])
        return {"dict": sorted(pairs, key=lambda pair: _order(pair[0]))}
    raise InputError(
        f"{path}: a value of type {type(value).__module__}.{type(value).__qualname__} cannot be "
        "part of a step's identity; use numbers, strings, tuples, dicts, enums, functions or "
        "frozen dataclasses of these"
    )


def _canonical_function(value: Any, path: str, depth: int, classes: Classes) -> dict[str, Any]:
    """A function by its name, and the arguments that `functools.partial` gives it.

    Its code is not part of it: a step that takes one has a version for it.
    """
    if isinstance(value, functools.partial):
        parts = {"partial": value.func, "args": value.args, "keywords": value.keywords}
        return {n: _canonical(v, f"{path}.{n}", depth + 1, classes) for n, v in parts.items()}
    if not value.__qualname__.replace(".", "").isidentifier():
        raise InputError(
            f"{path}: {value.__qualname__} has no name by which a step's identity could know it; "
            "define it with def, at the top of a file"
        )
    return {"function": _name_of(value, path, classes)}


def plain(tree: Any) -> Any:
    """A canonical tree in readable form: without classes and type tags."""
    if not isinstance(tree, dict):
        return tree
    if _is_config(tree):
        return {name: plain(value) for name, (value, _) in sorted(_fields(tree).items())}
    if set(tree) == {"enum", "member"}:
        return f"{tree['enum'].rpartition('.')[2]}.{tree['member']}"
    if len(tree) == 1:
        ((tag, value),) = tree.items()
        if tag == "float" and isinstance(value, str):
            return float.fromhex(value)
        if tag == "function":
            return value
        if tag == "bytes" and isinstance(value, str):
            return f"0x{value}"
        if tag in ("list", "tuple", "set") and isinstance(value, list):
            return [plain(item) for item in value]
        if tag == "dict" and isinstance(value, list):
            return {str(plain(key)): plain(item) for key, item in value}
    return {name: plain(value) for name, value in tree.items()}


def plain_identity(value: Any) -> Any:
    return plain(canonical(value))


def _order(tree: Any) -> str:
    # Sorted without defaults, so that a field added with a default does not change the order.
    return _dumps(without_defaults(tree))


def _canonical_text(value: str, path: str) -> str:
    # JSON encodes a surrogate pair exactly as the single character of that UTF-16 pair, so two
    # different strings would have the same digest.
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise InputError(f"{path}: {value[:40]!a} holds surrogates and is not Unicode text")
    if SECRET.search(value):
        raise InputError(
            f"{path}: looks like a secret, and configurations are recorded in the store; {REMEDY}"
        )
    return value


def _canonical_dataclass(value: Any, path: str, depth: int, classes: Classes) -> dict[str, Any]:
    cls = type(value)
    if isinstance(value, _BUILTINS):
        raise InputError(
            f"{path}: {cls.__qualname__} is a dataclass and a builtin type at once, and "
            "only its fields could be part of a step's identity; give it a field instead"
        )
    if not value.__dataclass_params__.frozen:
        raise InputError(
            f"{path}: {cls.__qualname__} must be @dataclass(frozen=True) to be part of a "
            "step's identity"
        )
    name = _name_of(cls, path, classes)
    fields = {
        field: _canonical(getattr(value, field), f"{path}.{field}", depth + 1, classes)
        for field in identity_fields(cls)
    }
    return {"class": name, **group_fields(fields, _defaults(cls))}


@functools.cache
def _defaults(cls: type) -> dict[str, Any]:
    identifying, found = identity_fields(cls), {}
    for field in dataclasses.fields(cls):
        if field.name not in identifying:
            continue
        if field.default is not dataclasses.MISSING:
            found[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            found[field.name] = field.default_factory()
    return {name: tree for name, value in found.items() for tree in canonical_default(value)}


def canonical_default(value: Any) -> tuple[Any, ...]:
    """The canonical form of a default value; empty if it has none, so that no call may use it."""
    try:
        return (canonical(value, "default"),)
    except InputError:
        return ()


def _name_of(cls: Any, path: str, classes: Classes) -> str:
    name = vars(cls).get("identity_name")
    if name is None:
        if "<locals>" in cls.__qualname__:
            raise InputError(
                f"{path}: {cls.__qualname__} is defined in a function; move it to a module"
            )
        name = cls.__qualname__
    _register(classes, name, cls, path)
    return name


def _register(classes: Classes, name: str, cls: Any, path: str) -> None:
    other = classes.setdefault(name, cls)
    if other is not cls and (_home(other) != _home(cls) or _code(other) != _code(cls)):
        raise InputError(
            f"{path}: two different ones are named {name!r} in keys: "
            f"{other.__module__}.{other.__qualname__} and {cls.__module__}.{cls.__qualname__}; "
            'give one of them another name: identity_name: ClassVar[str] = "..."'
        )


def _code(each: Any) -> Any:
    """The code of a function, which two functions of one name in one file must share."""
    return each.__code__ if isinstance(each, types.FunctionType) else None


def _home(cls: Any) -> tuple[str, str]:
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return os.path.realpath(file) if file else cls.__module__, cls.__qualname__


def _dumps(tree: Any) -> str:
    return json.dumps(tree, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def digest(tree: Any) -> str:
    """Hex SHA-256 of a canonical tree's JSON (sorted keys, ASCII, no spaces)."""
    return hashlib.sha256(_dumps(tree).encode("ascii")).hexdigest()


def difference(old: Any, new: Any, path: str = "") -> list[str]:
    """Field-level differences of two canonical trees, as `path: old -> new` lines.

    A field that only one tree has, with its default value, is no difference.
    """
    if type(old) is dict and type(new) is dict:
        if _is_config(old) and _is_config(new):
            named = difference(old.get("class"), new.get("class"), f"{path}.class".strip("."))
            return [*named, *_field_differences(_fields(old), _fields(new), path)]
        lines = []
        for key in sorted({*old, *new}):
            # The type tags of `canonical` are left out of the path, for readability.
            inner = path if key in ("float", "list", "tuple") else f"{path}.{key}".strip(".")
            lines += difference(old.get(key, _ABSENT), new.get(key, _ABSENT), inner)
        return lines
    if type(old) is list and type(new) is list and len(old) == len(new):
        return [
            line
            for i, (a, b) in enumerate(zip(old, new, strict=True))
            for line in difference(a, b, f"{path}[{i}]")
        ]
    return [] if same(old, new) else [f"{path}: {_show(old)} -> {_show(new)}"]


_CHANGED = " (the default changed)"
_Fields = dict[str, tuple[Any, bool]]


def _is_config(tree: Mapping[str, Any]) -> bool:
    return "fields" in tree and "defaults" in tree


def _fields(config: Mapping[str, Any]) -> _Fields:
    given = {name: (tree, False) for name, tree in config["fields"].items()}
    return {**given, **{name: (tree, True) for name, tree in config["defaults"].items()}}


def _field_differences(old: _Fields, new: _Fields, path: str) -> list[str]:
    lines = []
    for name in sorted({*old, *new}):
        inner = f"{path}.{name}".strip(".")
        was, was_default = old.get(name, (_ABSENT, name in new and new[name][1]))
        now, now_default = new.get(name, (_ABSENT, was_default))
        if was_default and now_default and _ABSENT in (was, now):
            continue
        changed = difference(was, now, inner)
        if was_default and now_default:
            changed = [line.removesuffix(_CHANGED) + _CHANGED for line in changed]
        elif not changed and was_default != now_default:
            which = "now the default" if now_default else "the default before"
            changed = [f"{inner}: {_show(now)} is {which}, so the key changes"]
        lines += changed
    return lines


def _show(leaf: Any) -> str:
    if leaf is _ABSENT or leaf is None or isinstance(leaf, bool):
        return "(absent)" if leaf is _ABSENT else str(leaf)
    if isinstance(leaf, str) and re.fullmatch(r"-?0x[01]\.[0-9a-f]+p[+-]\d+", leaf):
        return repr(float.fromhex(leaf))
    text = json.dumps(plain(leaf))
    return text if len(text) <= 60 else text[:57] + "..."


_ABSENT = object()
