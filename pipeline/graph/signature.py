"""Reading a step's signature: which arguments are inputs, and which stay out of the key."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

from pipeline.errors import InputError
from pipeline.graph.artifact import Artifact, Live
from pipeline.identity import fingerprint
from pipeline.identity.listing import External


@dataclass(frozen=True)
class InputType:
    """An input argument: its artifact class, and whether it may be None, a tuple, or read live."""

    kind: type[Artifact]
    optional: bool = False
    many: bool = False
    live: bool = False
    or_value: bool = False  # a configuration value instead: `Annotated[Documents | str, ...]`


@dataclass(frozen=True)
class Signature:
    """The arguments of a step, by their roles."""

    parameters: inspect.Signature  # of a call, which has no `StepContext`
    inputs: Mapping[str, InputType]
    runtime: frozenset[str]
    classes: Mapping[str, type]  # of the arguments that are annotated with one dataclass
    defaults: Mapping[str, Any]  # canonical ones of the configuration arguments
    externals: Mapping[str, External]  # marks of arguments that name data outside the store


def read_signature(function: Callable[..., Any]) -> Signature:
    signature = inspect.signature(function)
    hints = typing.get_type_hints(function, include_extras=True)
    parameters = list(signature.parameters.values())[1:]
    inputs, runtime, classes, defaults, externals = {}, set(), {}, {}, {}
    for parameter in parameters:
        if parameter.name not in hints:
            raise InputError(
                f"step {function.__qualname__}: argument {parameter.name!r} has no annotation; add "
                "one: the type distinguishes inputs from configuration"
            )
        hint = hints[parameter.name]
        for mark in getattr(hint, "__metadata__", ()):
            if isinstance(mark, External):
                externals[parameter.name] = mark
        if (declared := _as_input(hint)) is not None:
            inputs[parameter.name] = declared
            continue
        if fingerprint.is_runtime(hint):
            runtime.add(parameter.name)
        elif parameter.default is not parameter.empty:
            for tree in fingerprint.canonical_default(parameter.default):
                defaults[parameter.name] = tree
        plain = typing.get_args(hint)[0] if hasattr(hint, "__metadata__") else hint
        if isinstance(plain, type) and is_dataclass(plain):
            classes[parameter.name] = plain
    left = signature.replace(parameters=parameters)
    return Signature(left, inputs, frozenset(runtime), classes, defaults, externals)


def _as_input(annotation: Any) -> InputType | None:
    """The input that an annotation with an artifact class declares; None for any other one."""
    if marks := getattr(annotation, "__metadata__", ()):
        found = _as_input(typing.get_args(annotation)[0])
        return replace(found, live=Live in marks) if found is not None else None
    if typing.get_origin(annotation) is tuple:
        first, *rest = typing.get_args(annotation)
        if rest == [...] and isinstance(first, type) and issubclass(first, Artifact):
            return InputType(first, many=True)
    options = (
        typing.get_args(annotation)
        if typing.get_origin(annotation) in (typing.Union, types.UnionType)
        else (annotation,)
    )
    kinds = [o for o in options if isinstance(o, type) and issubclass(o, Artifact)]
    if len(kinds) != 1:
        return None
    others = {option for option in options if option not in (kinds[0], type(None))}
    return InputType(kinds[0], type(None) in options, or_value=bool(others))
