"""Every field that a step of the library can be given, found by reflection, and another value.

A leaf is a plain argument of a step, or a field of a dataclass that is an argument, at any depth.
What cannot be changed by a rule below is an `AssertionError`: a new kind of field needs a rule.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import pkgutil
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import experiments
import steps
from data.read.unit import Fields
from experiments.run_200m import experiment
from models.shape.config import TransformerConfig
from pipeline import Artifact, Hardware, InputError, Runtime, local, pod, step
from pipeline.graph.step import Node, StepSpec, as_node
from training.config.parallelism import Rules

SMOKE = experiment.presets["smoke"]
# Words that validated text fields accept; a field takes the first that differs and is accepted.
_WORDS = (
    *("constant", "float32", "bfloat16", "lion", "reference", "none", "train"),
    *("relu2", "layer", "learned", "rotary", "mup", "LS", "fsdp"),
    *("tensorboard", "host", "something else"),
)
# Fields that must agree with another one: what that one then is. The example of a model has both
# set, so that they change alone wherever that is possible.
_COMPANIONS = {
    "positions": lambda new: {"context": 4096 if new == "learned" else None},
    "context": lambda new: {"positions": "learned"},
    "window_pattern": lambda new: {"window": 64 if "S" in new else None},
    "window": lambda new: {"window_pattern": "SL"},
    "head_std": lambda new: {"tied": False},
    "muon_momentum_start": lambda new: {"muon_momentum_warmup": 5},
    "muon_momentum_warmup": lambda new: {"muon_momentum_start": 0.5},
}


@dataclass(frozen=True)
class Leaf:
    """One field: the step, the way to it, and whether any part of the way is marked Runtime."""

    step: StepSpec[..., Any]
    path: tuple[str, ...]
    runtime: bool

    @property
    def name(self) -> str:
        """`step.argument.field`, for people."""
        return ".".join((self.step.name, *self.path))

    def nodes(self) -> tuple[Node, Node]:
        """A node, and one that differs in this field alone."""
        arguments = base_arguments(self.step)
        name, *rest = self.path
        changed = change(_hints(self.step.function)[name], arguments[name], rest)
        return build(self.step, arguments), build(self.step, {**arguments, name: changed})


def library() -> list[StepSpec[..., Any]]:
    """Every step that a module of `steps` or `experiments` declares, by name."""
    found = {}
    for package in (steps, experiments):
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            if module.name.endswith("__main__"):
                continue
            values = vars(importlib.import_module(module.name)).values()
            found |= {value.name: value for value in values if isinstance(value, StepSpec)}
    return [found[name] for name in sorted(found)]


def leaves() -> list[Leaf]:
    """Every leaf of every step of the library."""
    return [Leaf(s, path, runtime) for s in library() for path, runtime in leaves_of(s.function)]


def leaves_of(function: Callable[..., Any]) -> Iterator[tuple[tuple[str, ...], bool]]:
    """(path, is runtime) of every leaf of one step's function."""
    hints = _hints(function)
    for name in list(inspect.signature(function).parameters)[1:]:
        if artifact_of(hints[name]) is None:
            yield from _below((name,), hints[name], False)


def _below(
    path: tuple[str, ...], hint: Any, runtime: bool
) -> Iterator[tuple[tuple[str, ...], bool]]:
    # Not `fingerprint.is_runtime`: what it decides is what is tested.
    runtime = runtime or Runtime in getattr(hint, "__metadata__", ())
    plain = bare(hint)
    if not dataclasses.is_dataclass(plain):
        yield path, runtime
        return
    hints = _hints(plain)
    for field in dataclasses.fields(plain):
        yield from _below((*path, field.name), hints[field.name], runtime)


@functools.cache
def _hints(thing: Any) -> dict[str, Any]:
    return typing.get_type_hints(thing, include_extras=True)


def bare(hint: Any) -> Any:
    """The annotation without its marks."""
    return bare(typing.get_args(hint)[0]) if typing.get_origin(hint) is Annotated else hint


def artifact_of(hint: Any) -> tuple[type[Artifact], bool] | None:
    """(artifact class, given as a tuple) when the annotation is of an input; None otherwise.

    An input in whose place a text may be given is a leaf with a text.
    """
    options = typing.get_args(hint) or (hint,)
    if str in typing.get_args(bare(hint)):
        return None
    found = [o for o in options if isinstance(o, type) and issubclass(o, Artifact)]
    return (found[0], typing.get_origin(hint) is tuple) if found else None


def base_arguments(step_function: StepSpec[..., Any]) -> dict[str, Any]:
    """Configuration that the step accepts: the smoke preset's parts, and defaults."""
    hints, arguments = _hints(step_function.function), {}
    for name, parameter in list(inspect.signature(step_function.function).parameters.items())[1:]:
        if artifact_of(hints[name]) is None:
            default = parameter.default
            given = default if default is not parameter.empty else _example(bare(hints[name]))
            arguments[name] = given
    return arguments


def _example(kind: Any) -> Any:
    parts = [getattr(SMOKE, field.name) for field in dataclasses.fields(SMOKE)]
    for part in parts:
        if kind is TransformerConfig and isinstance(part, TransformerConfig):
            windows = {"window_pattern": "SL", "window": 64}
            return dataclasses.replace(part, positions="learned", context=4096, **windows)
        if isinstance(kind, type) and type(part) is kind:
            return part
    if typing.get_origin(kind) is tuple:
        return ()
    if str in typing.get_args(kind):
        return "/data/*.parquet"
    if Callable in _origins(kind):
        return leaves
    if kind is Fields:
        return Fields()
    raise AssertionError(
        f"no example of {kind}; teach tests/pipeline/identity/identity_fields.py one"
    )


def _origins(kind: Any) -> list[Any]:
    """What a type, or each option of a union, is a form of."""
    options = typing.get_args(kind) if typing.get_origin(kind) is types.UnionType else (kind,)
    return [typing.get_origin(option) for option in options]


def build(step_function: StepSpec[..., Any], arguments: dict[str, Any]) -> Node:
    """A node of the step over stand-in inputs, every optional one given.

    The step's own check of its arguments is left out, as a key is as good for values that cannot
    work, and so is a step that follows it.
    """
    step_function = dataclasses.replace(step_function, check=None, then=None)
    hints, inputs = _hints(step_function.function), {}
    for name in list(inspect.signature(step_function.function).parameters)[1:]:
        if (found := artifact_of(hints[name])) is not None:
            kind, many = found
            stand_in = _source(kind)
            inputs[name] = (stand_in,) if many else stand_in
    return as_node(step_function(**inputs, **arguments))


@functools.cache
def _source(kind: type[Artifact]) -> Any:
    def source(run: Any) -> dict[str, Any]:
        return {}

    return step(output=kind, version=1, name=f"source_of_{kind.__name__}")(source)()


def change(hint: Any, value: Any, path: list[str]) -> Any:
    """`value` with the leaf at `path` below it changed, everything else kept."""
    if not path:
        return next(other for other in candidates(bare(hint), value) if not _same(other, value))
    first, *rest = path
    field_hint, old = _hints(bare(hint))[first], getattr(value, first)
    if rest:
        return dataclasses.replace(value, **{first: change(field_hint, old, rest)})
    for other in candidates(bare(field_hint), old):
        try:
            if not _same(other, old):
                along = _COMPANIONS.get(first, lambda new: {})(other)
                return dataclasses.replace(value, **{first: other, **along})
        except InputError:
            continue
    raise AssertionError(f"{type(value).__name__}.{first}: no value but {old!r} was accepted")


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and a == b


def candidates(kind: Any, value: Any) -> Iterator[Any]:
    """Other values that a field of the type may take, likely ones first."""
    kind = bare(kind)
    if isinstance(kind, type) and issubclass(kind, Artifact):
        return
    if typing.get_origin(kind) is Callable:
        yield from (leaves, bare)
    elif kind == Rules:
        yield (("embed", ("data",)),)
    elif typing.get_origin(kind) is Literal:
        yield from typing.get_args(kind)
    elif typing.get_origin(kind) in (typing.Union, types.UnionType):
        for option in typing.get_args(kind):
            # What a field that is None now would be, made from nothing.
            yield from candidates(
                option, value if isinstance(value, option_type(bare(option))) else None
            )
    elif kind is bool:
        yield not value
    elif kind is int:
        yield from ((value or 0) + 1, (value or 0) + 2, (value or 0) * 2)
    elif kind is float:
        yield from ((value or 0.0) * 0.5, (value or 0.0) + 0.25, (value or 0.0) + 2.0)
    elif kind is str:
        yield from _WORDS
    elif typing.get_origin(kind) is tuple and typing.get_args(kind)[1:] == (...,):
        for item in candidates(typing.get_args(kind)[0], None):
            yield (*(value or ()), item)
    elif typing.get_origin(kind) is tuple:
        yield tuple(next(candidates(bare(part), None)) for part in typing.get_args(kind))
    elif kind is TransformerConfig and value is None:
        yield _example(kind)
    elif dataclasses.is_dataclass(kind) and kind is not Hardware and value is None:
        required = {
            field.name: next(candidates(bare(_hints(kind)[field.name]), None))
            for field in dataclasses.fields(kind)
            if field.default is dataclasses.MISSING
        }
        yield typing.cast(type[Any], kind)(**required)
    elif kind is Hardware:
        yield from (pod("cpu-2x2"), local())
    elif kind is type(None):
        yield None
    else:
        raise AssertionError(f"no rule changes a {kind}; write one in {__name__}")


def option_type(option: Any) -> Any:
    """The class an option of a union can be asked with."""
    return option if isinstance(option, type) else object
