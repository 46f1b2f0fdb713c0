"""Steps and nodes: declaring a graph.

A step is a function whose first argument is the `StepRun` it executes in. Decorated, calling it
builds a `Node`; nothing runs. Arguments annotated with an `Artifact` class are inputs and take
nodes; all others are configuration, and those marked `Annotated[..., Runtime]` stay out of the key.

    @step(output=Tokenizer, version=1)
    def train_tokenizer(run: StepRun, documents: Documents, *, vocab_size: int) -> Result: ...

    tokenizer = train_tokenizer(documents, vocab_size=32_768)

A node stands for its artifact: to a type checker `tokenizer` is a `Tokenizer`, and handing it over
where documents belong is an error there as it is, with the argument named, when the file runs.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from pipeline import fingerprint
from pipeline.artifact import Artifact
from pipeline.errors import InputError

if typing.TYPE_CHECKING:
    from pipeline.run import StepRun

P = ParamSpec("P")
A = TypeVar("A", bound=Artifact)
Result = Mapping[str, Any]

_KEY_DIGITS = 20  # of 64 hex digits appear in the path: 80 bits; the manifest has them all


class Node:
    """One call of a step in a graph: what to run, on which inputs, with which configuration.

    `label` is what people call it: the step function's own name, or the one `named` gave.
    """

    def __init__(
        self,
        step: StepFunction[..., Any],
        inputs: dict[str, Node],
        config: dict[str, Any],
        runtime: dict[str, Any],
    ) -> None:
        self.step = step
        self.inputs = inputs
        self.config = config
        self.runtime = runtime
        self.label = step.label
        self.canonical_config = {
            name: fingerprint.canonical(value, f"{step.label}({name}=...)")
            for name, value in config.items()
        }
        self.key = fingerprint.digest(
            {
                "step": step.name,
                "version": step.version,
                "config": self.canonical_config,
                "inputs": {name: node.key for name, node in inputs.items()},
            }
        )

    @property
    def directory(self) -> str:
        """Name of its output directory under the store's prefix; a display name changes nothing."""
        return f"{self.step.label}-{self.key[:_KEY_DIGITS]}"

    def __repr__(self) -> str:
        return f"<{self.directory}>"


class StepFunction(Generic[P, A]):
    """A declared step; calling it builds a `Node`."""

    def __init__(
        self,
        function: Callable[Concatenate[StepRun, P], Result],
        output: type[A],
        version: int,
        name: str | None,
        cpus: float,
    ) -> None:
        functools.update_wrapper(self, function)
        if function.__module__ == "__main__" and name is None:
            raise InputError(
                f"step {function.__qualname__}: a step defined in the file that is run needs a "
                f'stable name; write @step(name="{function.__qualname__}", ...)'
            )
        self.function = function
        self.output = output
        self.version = version
        self.name = name or f"{function.__module__}.{function.__qualname__}"
        self.label = function.__name__
        self.cpus = cpus
        self._signature, self._inputs, self._runtime = _read_signature(function)

    @property
    def input_types(self) -> dict[str, type[Artifact]]:
        """Artifact class of each input argument."""
        return {name: kind for name, (kind, _) in self._inputs.items()}

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> A:
        """A node that stands for the step's artifact.

        Raises:
            InputError: for arguments that do not fit, naming the argument and both types.
        """
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise InputError(f"{self.label}(): {error}") from None
        bound.apply_defaults()
        inputs, config, runtime = {}, {}, {}
        for name, value in bound.arguments.items():
            if name in self._inputs:
                if (node := self._check_input(name, value)) is not None:
                    inputs[name] = node
            elif isinstance(value, Node):
                raise InputError(
                    f"{self.label}({name}=...): expected a configuration value, got the output of "
                    f"step {value.label!r}"
                )
            else:
                (runtime if name in self._runtime else config)[name] = value
        return typing.cast(A, Node(self, inputs, config, runtime))

    def _check_input(self, name: str, value: Any) -> Node | None:
        expected, optional = self._inputs[name]
        if value is None and optional:
            return None
        if isinstance(value, Node) and issubclass(value.step.output, expected):
            return value
        found = (
            f"{value.step.output.__name__} (the output of step {value.label!r})"
            if isinstance(value, Node)
            else f"{value!r} of type {type(value).__name__}"
        )
        raise InputError(f"{self.label}({name}=...): expected {expected.__name__}, got {found}")

    def __reduce__(self) -> Any:
        # A worker finds the step where the driver did; only a step of the file being run has no
        # importable home and travels by value.
        if self.function.__module__ == "__main__":
            return (StepFunction, (self.function, self.output, self.version, self.name, self.cpus))
        return (_find, (self.function.__module__, self.function.__qualname__))


def _find(module: str, qualname: str) -> Any:
    return functools.reduce(getattr, qualname.split("."), importlib.import_module(module))


def _artifact_type(annotation: Any) -> tuple[type[Artifact], bool] | None:
    """(artifact class, may be None) when an annotation names an artifact; None otherwise."""
    options = (
        typing.get_args(annotation)
        if typing.get_origin(annotation) in (typing.Union, types.UnionType)
        else (annotation,)
    )
    found = [o for o in options if isinstance(o, type) and issubclass(o, Artifact)]
    return (found[0], type(None) in options) if len(found) == 1 else None


def _read_signature(
    function: Callable[..., Any],
) -> tuple[inspect.Signature, dict[str, tuple[type[Artifact], bool]], frozenset[str]]:
    signature = inspect.signature(function)
    hints = typing.get_type_hints(function, include_extras=True)
    parameters = list(signature.parameters.values())[1:]
    inputs, runtime = {}, set()
    for parameter in parameters:
        hint = hints[parameter.name]
        if (artifact := _artifact_type(hint)) is not None:
            inputs[parameter.name] = artifact
        elif fingerprint.is_runtime(hint):
            runtime.add(parameter.name)
    return signature.replace(parameters=parameters), inputs, frozenset(runtime)


def step(
    *, output: type[A], version: int, name: str | None = None, cpus: float = 1
) -> Callable[[Callable[Concatenate[StepRun, P], Result]], StepFunction[P, A]]:
    """Declare a step.

    Args:
        output: the artifact class of what it publishes.
        version: raise it when the code changes what comes out; it is part of the key.
        name: stable name, part of the key; by default module and qualified name.
        cpus: cores the step's own body needs; 0 for a body that only waits for its workers.
    """

    def declare(function: Callable[Concatenate[StepRun, P], Result]) -> StepFunction[P, A]:
        return StepFunction(function, output, version, name, cpus)

    return declare


def as_node(artifact: Artifact | Node) -> Node:
    """The node behind what a step call returned. Raises `InputError` for anything else."""
    if isinstance(artifact, Node):
        return artifact
    raise InputError(f"expected the output of a step call, got {artifact!r}")


def named(artifact: A, name: str) -> A:
    """The same node under another display name, for graphs that call a step twice.

    The name is not part of the key: renaming keeps what was built.
    """
    as_node(artifact).label = name
    return artifact


def topological(targets: list[Node]) -> list[Node]:
    """Every node the targets need, inputs before users; equal nodes (same key) once."""
    order: dict[str, Node] = {}
    stack = [(node, False) for node in reversed(targets)]
    while stack:
        node, expanded = stack.pop()
        if node.key in order:
            continue
        if expanded:
            order[node.key] = node
        else:
            stack.append((node, True))
            stack.extend((child, False) for child in node.inputs.values())
    return list(order.values())
