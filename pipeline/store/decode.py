"""Records in a store: strict JSON in, JSON out.

A truncated or hand-edited record, or one of another version, must fail here and not become an
object that fails later.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import msgspec

from pipeline.errors import InputError

T = TypeVar("T")


class Stored(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A record in a store; only a field that records of earlier versions lack has a default."""


def parse_json(data: bytes) -> Any:
    """Strict JSON: `ValueError` also for a duplicate field, a NaN, and too deep a nesting."""
    try:
        text = data.decode("utf-8")
        return json.loads(text, object_pairs_hook=_each_once, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def to_json(record: Any) -> bytes:
    """A record as JSON that `parse_json` reads; `InputError` names what is NaN or infinite."""
    tree = msgspec.to_builtins(record)
    try:
        return json.dumps(tree, sort_keys=True, allow_nan=False).encode()
    except ValueError:
        names = ", ".join(_not_finite(tree, ""))
        raise InputError(
            f"{names}: expected a finite number, found NaN or infinity, which JSON cannot "
            "represent; leave the result out, or find out why it is not finite"
        ) from None


def json_line(entry: Mapping[str, Any]) -> bytes:
    """One line of a log: null stands for NaN and infinity, text for values that JSON lacks."""
    try:
        text = json.dumps(entry, default=str, allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(json.loads(json.dumps(entry, default=str))))
    return text.encode() + b"\n"


def _finite(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {name: _finite(part) for name, part in tree.items()}
    if isinstance(tree, list):
        return [_finite(part) for part in tree]
    return None if isinstance(tree, float) and not math.isfinite(tree) else tree


def plain_result(result: Any) -> dict[str, Any]:
    """What a step or shard returned, as JSON values; numbers of numpy and JAX become Python's."""
    try:
        return json.loads(json.dumps(dict(result), default=_plain))
    except (TypeError, ValueError):
        wrong = "; ".join(_not_plain(result, "result"))
        raise InputError(
            f"expected a mapping of JSON values (text, numbers, lists, mappings), found {wrong}"
        ) from None


def _plain(value: Any) -> Any:
    # Without an import of numpy: an array of no dimensions.
    return value.item() if getattr(value, "shape", None) == () else msgspec.to_builtins(value)


def _not_plain(tree: Any, path: str) -> Iterator[str]:
    if isinstance(tree, Mapping):
        for name, part in tree.items():
            yield from _not_plain(part, f"{path}[{name!r}]")
            if not isinstance(name, str | int | float | None):
                yield f"the name {name!r} in {path}"
    elif isinstance(tree, list | tuple) and path != "result":
        for number, part in enumerate(tree):
            yield from _not_plain(part, f"{path}[{number}]")
    else:
        try:
            json.dumps(tree, default=_plain)
        except (TypeError, ValueError):
            yield f"{path} of type {type(tree).__name__}"
        else:
            if path == "result":
                yield f"a {type(tree).__name__}"


def _not_finite(tree: Any, path: str) -> Iterator[str]:
    if isinstance(tree, float) and not math.isfinite(tree):
        yield path
    parts = dict(enumerate(tree)) if isinstance(tree, list) else tree
    for name, part in parts.items() if isinstance(parts, dict) else ():
        yield from _not_finite(part, f"{path}.{name}".strip("."))


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    tree = dict(pairs)
    if len(tree) != len(pairs):
        raise ValueError("duplicate field")
    return tree


def decode(kind: type[T], tree: Any) -> T:
    """A record from JSON values; the `ValueError` names the field that is not as declared."""
    try:
        return msgspec.convert(tree, kind)
    except (msgspec.ValidationError, OverflowError, RecursionError) as error:
        raise ValueError(f"{kind.__name__}: {error}") from None
