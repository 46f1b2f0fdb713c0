"""Steps and nodes: declaring a graph.

A step is a function whose first argument is the `StepContext` it executes in. Decorated, calling it
builds a `Node`; nothing runs. Arguments annotated with an `Artifact` class (or `tuple[Class, ...]`,
or `Annotated[Class, Live]`, see `pipeline.graph.live`) are inputs and take nodes; all others are
configuration, and those marked `Annotated[..., Runtime]` stay out of the key.

    @step(output=Tokenizer, version=1)
    def train_tokenizer(run: StepContext, documents: Documents, *, vocab_size: int) -> Result: ...

    tokenizer = train_tokenizer(documents, vocab_size=32_768)

A node stands for its artifact: to a type checker `tokenizer` is a `Tokenizer`, and handing it over
where documents belong is an error there as it is, with the argument named, when the file runs.
"""

from __future__ import annotations

import collections
import functools
import importlib
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from pipeline.errors import InputError
from pipeline.graph.artifact import Artifact
from pipeline.graph.module_names import by_value, module_name
from pipeline.graph.signature import Input, read_signature
from pipeline.identity import fingerprint

if typing.TYPE_CHECKING:
    from pipeline.execute.step_context import StepContext

P = ParamSpec("P")
A = TypeVar("A", bound=Artifact)
Result = Mapping[str, Any]
# From a step's configuration and runtime settings to what `plan` should say about them.
Advise = Callable[[Mapping[str, Any]], list[str]]
# Raises `InputError` for arguments of a call that cannot work: configuration, runtime and nodes.
Check = Callable[[Mapping[str, Any]], None]

_KEY_DIGITS = 20  # of 64 hex digits appear in the path: 80 bits; the manifest has them all
_SHOWN_DIGITS = 6  # tell nodes of one label apart on a screen
_SHOWN_STEPS = 8  # of a cycle, in the message about it
_LABEL_LENGTH = 64


@dataclass(frozen=True)
class Resources:
    """What a step's own body needs while it runs; its shards and gangs ask for their own.

    Attributes:
        cpus: cores; 0 for a body that only waits for its workers.
        memory: bytes of host memory to reserve; 0 for no reservation.
        custom: other resources by name, as the cluster's nodes declare them.
        tries: attempts in a row, without a new shard or checkpoint, before a transient failure
            (lost worker, storage error) is final.
    """

    cpus: float = 1
    memory: int = 0
    custom: Mapping[str, float] = field(default_factory=dict)
    tries: int = 3


class Node:
    """One call of a step in a graph: what to run, on which inputs, with which configuration.

    `label` is what people call it: the step function's own name, or the one `named` gave. Inputs
    are by argument; a tuple's are `argument[0]`, `argument[1]`, ...; `live` are those that are read
    while they are made.
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
        self.live = frozenset(n for n in inputs if step.inputs[n.partition("[")[0]].live)
        self.config = config
        self.runtime = runtime
        self.output: type[Artifact] = step.output
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

    def recipe(self, contents: Mapping[str, str]) -> str:
        """Digest of the step, its configuration and its inputs' contents (by input name).

        Two nodes that share it make the same thing, whatever their inputs were made from.
        """
        return recipe(self.step, self.canonical_config, contents)

    def advice(self) -> list[str]:
        """What its step says about this configuration before anything runs."""
        return self.step.advise({**self.config, **self.runtime}) if self.step.advise else []

    @property
    def directory(self) -> str:
        """Name of its output directory under the store's prefix; a display name changes nothing."""
        return f"{self.step.label}-{self.key[:_KEY_DIGITS]}"

    def __repr__(self) -> str:
        return f"<{self.directory}>"


def recipe(
    step: StepFunction[..., Any], canonical_config: Mapping[str, Any], contents: Mapping[str, str]
) -> str:
    """See `Node.recipe`."""
    return fingerprint.digest(
        {
            "step": step.name,
            "version": step.version,
            "config": canonical_config,
            "contents": dict(contents),
        }
    )


class StepFunction(Generic[P, A]):
    """A declared step; calling it builds a `Node`."""

    def __init__(
        self,
        function: Callable[Concatenate[StepContext, P], Result],
        output: type[A],
        version: int,
        name: str | None,
        resources: Resources,
        reads_lineage: bool,
        advise: Advise | None = None,
        check: Check | None = None,
    ) -> None:
        functools.update_wrapper(self, function)
        module = module_name(function)
        if module == "__main__" and name is None:
            raise InputError(
                f"step {function.__qualname__}: a step that is defined in no file needs a "
                f'stable name; write @step(name="{function.__qualname__}", ...)'
            )
        if not (function.__name__.isascii() and function.__name__.isidentifier()):
            raise InputError(
                f"step {function.__qualname__!a}: its function's name becomes the name of a "
                "directory; give it one of letters a-z, digits and _"
            )
        self.function = function
        self.output = output
        self.version = version
        self.name = name or f"{module}.{function.__qualname__}"
        self.label = function.__name__
        self.resources = resources
        self.reads_lineage = reads_lineage
        self.advise = advise
        self.check = check
        self._signature, self._inputs, self._runtime, self._classes = read_signature(function)

    @property
    def inputs(self) -> Mapping[str, Input]:
        """Its input arguments by name."""
        return self._inputs

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> A:
        """A node that stands for the step's artifact.

        Raises:
            InputError: for arguments that do not fit, naming the argument and both types, and for
                those that the step's `check` refuses.
        """
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise InputError(f"{self.label}(): {error}") from None
        bound.apply_defaults()
        inputs, config, runtime = {}, {}, {}
        for name, value in bound.arguments.items():
            if name in self._inputs:
                inputs |= dict(self._input_nodes(name, value))
            elif isinstance(value, Node):
                raise InputError(
                    f"{self.label}({name}=...): expected a configuration value, got the output of "
                    f"step {value.label!r}"
                )
            else:
                (runtime if name in self._runtime else config)[name] = value
        self._refuse(bound.arguments)
        return typing.cast(A, Node(self, inputs, config, runtime))

    def _refuse(self, arguments: Mapping[str, Any]) -> None:
        """Raise `InputError` for configuration of another class, and for what `check` refuses."""
        for name, kind in self._classes.items():
            if not isinstance(value := arguments[name], kind):
                raise InputError(
                    f"{self.label}({name}=...): expected {kind.__name__}, got {value!r} of type "
                    f"{type(value).__name__}"
                )
        if self.check is None:
            return
        try:
            self.check(arguments)
        except (TypeError, ValueError, AttributeError) as error:
            # A check is written for arguments of the types that are annotated.
            raise InputError(
                f"{self.label}(...): {error}; see the types of its arguments"
            ) from error

    def _input_nodes(self, name: str, value: Any) -> Iterator[tuple[str, Node]]:
        expected = self._inputs[name]
        if expected.many:
            if not isinstance(value, tuple | list) or not value:
                raise InputError(
                    f"{self.label}({name}=...): expected one or more {expected.kind.__name__}, "
                    f"got {value!r}"
                )
            for index, item in enumerate(value):
                yield f"{name}[{index}]", self._check_input(f"{name}[{index}]", expected, item)
        elif value is not None or not expected.optional:
            yield name, self._check_input(name, expected, value)

    def _check_input(self, name: str, expected: Input, value: Any) -> Node:
        if isinstance(value, Node) and issubclass(value.output, expected.kind):
            return value
        found = (
            f"{value.output.__name__} (the output of step {value.label!r})"
            if isinstance(value, Node)
            else f"{value!r} of type {type(value).__name__}"
        )
        raise InputError(
            f"{self.label}({name}=...): expected {expected.kind.__name__}, got {found}"
        )

    def __reduce__(self) -> Any:
        # A worker imports the step as the driver did, unless its file is not sent to workers.
        if by_value(self.function):
            declared = (self.output, self.version, self.name, self.resources, self.reads_lineage)
            return (StepFunction, (self.function, *declared, self.advise, self.check))
        return (_find, (self.function.__module__, self.function.__qualname__))


def _find(module: str, qualname: str) -> Any:
    return functools.reduce(getattr, qualname.split("."), importlib.import_module(module))


def step(
    *,
    output: type[A],
    version: int,
    name: str | None = None,
    cpus: float = 1,
    memory: int = 0,
    custom: Mapping[str, float] | None = None,
    tries: int = 3,
    reads_lineage: bool = False,
    advise: Advise | None = None,
    check: Check | None = None,
) -> Callable[[Callable[Concatenate[StepContext, P], Result]], StepFunction[P, A]]:
    """Declare a step.

    Args:
        output: the artifact class of what it publishes.
        version: raise it when the code changes what comes out; it is part of the key.
        name: stable name, part of the key; by default module and qualified name.
        cpus, memory, custom, tries: see `Resources`.
        reads_lineage: it reads more of its inputs than what they hold, such as what they were made
            from; so it runs again when that changed, though their contents did not.
        advise: what `plan` says about its configuration before anything runs, such as a setting
            that will be slow; what cannot work is refused, not advised against.
        check: raises `InputError` for arguments, by name, that cannot work whatever the inputs will
            hold; when the step is called, so before anything runs.
    """

    def declare(function: Callable[Concatenate[StepContext, P], Result]) -> StepFunction[P, A]:
        resources = Resources(cpus, memory, custom or {}, tries)
        declared = (output, version, name, resources, reads_lineage, advise, check)
        return StepFunction(function, *declared)

    return declare


def as_node(artifact: Artifact | Node) -> Node:
    """The node behind what a step call returned. Raises `InputError` for anything else."""
    if isinstance(artifact, Node):
        return artifact
    raise InputError(f"expected the output of a step call, got {artifact!r}")


def named(artifact: A, name: str) -> A:
    """The same node under another display name, for graphs that call a step twice.

    The name is not part of the key: renaming keeps what was built.

    Raises:
        InputError: for a name that a log line, a flag or a path could not carry.
    """
    node = as_node(artifact)
    if not _is_display_name(name):
        raise InputError(
            f"named({node.label}, ...): expected 1 to {_LABEL_LENGTH} printable characters without "
            f"slashes, no '-' in front and no spaces around them, got {name!a:.300}"
        )
    node.label = name
    return artifact


def _is_display_name(name: Any) -> bool:
    return (
        isinstance(name, str)
        and 0 < len(name) <= _LABEL_LENGTH
        and name.isprintable()
        and name == name.strip()
        and not name.startswith("-")
        and not {"/", "\\"} & set(name)
    )


def topological(targets: list[Node]) -> list[Node]:
    """Every node the targets need, inputs before users; equal nodes (same key) once.

    Raises:
        InputError: for a cycle, for two steps that claim one key, and for two keys that would
            share a directory.
    """
    order: dict[str, Node] = {}
    entered: dict[str, Node] = {}
    owners: dict[str, Node] = {}
    stack = [(node, False) for node in reversed(targets)]
    while stack:
        node, expanded = stack.pop()
        if expanded:
            order[node.key] = entered.pop(node.key)
        elif node.key in entered:
            ring = list(entered)[list(entered).index(node.key) + 1 :]
            way = ", ".join(entered[key].label for key in ring[:_SHOWN_STEPS])
            way += f" and {len(ring) - _SHOWN_STEPS} more" if len(ring) > _SHOWN_STEPS else ""
            raise InputError(
                f"step {node.label!r} needs its own output"
                + (f", by way of {way}" if way else "")
                + "; a graph of steps cannot have a cycle"
            )
        elif node.key not in order:
            entered[node.key] = node
            _check_owner(node, owners.setdefault(node.directory, node))
            stack.append((node, True))
            stack.extend((child, False) for child in node.inputs.values())
        else:
            _check_owner(node, order[node.key])
    return list(order.values())


def _check_owner(node: Node, owner: Node) -> None:
    if node.key != owner.key:
        raise InputError(
            f"steps {owner.label!r} and {node.label!r} would both write to {node.directory}: their "
            f"keys {owner.key} and {node.key} begin alike; change the version of one of them"
        )
    if node.step.function is not owner.step.function:
        raise InputError(
            f"two steps are called {node.step.name!r} and cannot be told apart: "
            f"{_home(owner)} and {_home(node)}; give one of them another name"
        )


def _home(node: Node) -> str:
    code = node.step.function.__code__
    return f"{node.step.function.__qualname__} ({code.co_filename}:{code.co_firstlineno})"


def unique_labels(nodes: list[Node]) -> dict[str, str]:
    """Label of every node by key, with as much of the key as sets nodes of one label apart."""
    found: dict[str, str] = {}
    labels = collections.Counter(node.label for node in nodes)
    for node in nodes:
        found[node.key] = node.label
        if labels[node.label] > 1:
            found[node.key] = f"{node.label}@{node.key[:_SHOWN_DIGITS]}"
    # Keys that begin alike are told apart by all of their digits.
    shown = collections.Counter(found.values())
    return {k: v if shown[v] == 1 else f"{v.rpartition('@')[0]}@{k}" for k, v in found.items()}
