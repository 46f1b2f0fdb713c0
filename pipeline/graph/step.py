"""Steps: the functions that a graph consists of, and their declaration.

A step is a function whose first argument is the `StepContext` it executes in. Calling the decorated
function builds a `Node`; nothing runs. Arguments annotated with an `Artifact` class (or
`tuple[Class, ...]`, or `Annotated[Class, Live]`) are inputs and take nodes; all others are
configuration, and those marked `Annotated[..., Runtime]` are not in the key.

    @step(output=Tokenizer, version=1)
    def train_tokenizer(run: StepContext, documents: Documents, *, vocab_size: int) -> Result: ...

    tokenizer = train_tokenizer(documents, vocab_size=32_768)

A node stands for its artifact: for a type checker `tokenizer` is a `Tokenizer`. Passing it as
`documents` is an error in the type checker, and an `InputError` that names the argument when the
file runs.
"""

from __future__ import annotations

import functools
import importlib
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from pipeline.errors import InputError
from pipeline.graph.artifact import Artifact, argument_of
from pipeline.graph.facts import Facts, Results
from pipeline.graph.hardware import Hardware
from pipeline.graph.module_names import by_value
from pipeline.graph.signature import InputType, Signature, read_signature
from pipeline.identity import digests, fingerprint, source_code
from pipeline.identity.digests import Identity

if typing.TYPE_CHECKING:
    from pipeline.graph.step_context import StepContext

P = ParamSpec("P")
A = TypeVar("A", bound=Artifact)
Result = Mapping[str, Any]
_KEY_DIGITS = 20  # hex digits of the key in the path (80 bits); the manifest has all 64


@dataclass(frozen=True)
class Resources:
    """What a step's own body needs while it runs, and each of its shards; a gang has its hardware.

    `tries` are attempts in a row without a new shard or checkpoint, after which a transient failure
    (lost worker, storage error) is final. A lost host is no failure.
    """

    cpus: float = 1  # cores; 0 for a body that only waits for its workers
    memory: int = 0  # bytes of host memory to reserve; 0 for no reservation
    custom: Mapping[str, float] = field(default_factory=dict)  # others, as nodes declare them
    tries: int = 3
    shard_cpus: float = 1  # of each worker that writes a shard of a fan-out
    shard_memory: int = 0

    def __post_init__(self) -> None:
        for name in ("cpus", "memory", "tries", "shard_cpus", "shard_memory"):
            value, least = getattr(self, name), int(name == "tries")
            if not value >= least:
                raise InputError(f"{name}={value!r}: a step needs {name} of at least {least}")


class Node:
    """One call of a step in a graph: what to run, on which inputs, with which configuration.

    `label` is the display name; `labels` has it and those of equal nodes in the graph. `inputs` are
    by the names that keys and manifests have: of a tuple they are `argument[0]`, `argument[1]`, ...
    """

    def __init__(
        self,
        step: StepSpec[..., Any],
        inputs: dict[str, Node],
        config: dict[str, Any],
        runtime: dict[str, Any],
    ) -> None:
        self.step = step
        self.inputs = inputs
        self.live = frozenset(n for n in inputs if step.signature.inputs[argument_of(n)].live)
        self.config = config
        self.runtime = runtime
        self.output: type[Artifact] = step.output
        self.label = step.name
        self.labels: set[str] = set()  # filled by `topological`
        self.classes: fingerprint.Classes = {}
        values = {
            name: fingerprint.canonical(value, f"{step.name}({name}=...)", self.classes)
            for name, value in config.items()
        }
        full = fingerprint.group_fields(values, step.signature.defaults)
        self.identity = Identity(step.name, step.version, full)
        self.key = digests.key(self.identity, {name: node.key for name, node in inputs.items()})
        self.directory = f"{step.name}-{self.key[:_KEY_DIGITS]}"  # of its output, in a store
        self.reads_lineage = step.reads_lineage
        # Whose code makes the output: the step's, and what its configuration calls.
        self.functions = (
            step.function,
            *(c for each in self.classes.values() for c in _called(each)),
        )

    @property
    def hardware(self) -> list[Hardware]:
        return [value for value in self.runtime.values() if isinstance(value, Hardware)]

    def advice(self) -> list[str]:
        return self.step.advise({**self.config, **self.runtime}) if self.step.advise else []

    def __repr__(self) -> str:
        return f"<{self.directory}>"


def _called(each: Any) -> tuple[Any, ...]:
    """A configuration's function, or the classes of a callable value; none of other values."""
    if not isinstance(each, type):
        return (each,)
    ancestors = tuple(cls for cls in each.__mro__ if cls is not object)
    return ancestors if any("__call__" in vars(cls) for cls in ancestors) else ()


def as_node(artifact: Artifact | Node) -> Node:
    if isinstance(artifact, Node):
        return artifact
    raise InputError(f"expected the output of a step call, got {artifact!r}")


@dataclass(frozen=True, eq=False)
class StepSpec(Generic[P, A]):
    """A declared step; calling it builds a `Node`."""

    function: Callable[Concatenate[StepContext, P], Result]
    output: type[A]
    version: int
    name: str  # part of the key and of directory names
    resources: Resources = Resources()
    # It reads more of its inputs than their contents, such as their own inputs and configuration;
    # so it runs again when those changed and the contents did not.
    reads_lineage: bool = False
    # Lines that `plan` shows about its configuration and runtime settings.
    advise: Callable[[Mapping[str, Any]], list[str]] | None = None
    # Raises `InputError` for arguments of a call that cannot work with any content of the inputs.
    check: Callable[[Mapping[str, Any]], None] | None = None
    facts: Callable[[Node, Results], Facts] | None = None  # about a node before it runs
    # "module:function" of `plan --on`, imported for that alone: called with the command's
    # `Context`, the node and `Results`; prints, and returns the exit status.
    elsewhere: str = ""
    # Environment variables that it reads: the driver's values reach its workers and gangs on other
    # hosts, and are recorded, except those named like a secret (HF_TOKEN).
    environment: tuple[str, ...] = ()
    # The node that a call stands for: of another step, for what a runtime argument asks for and an
    # existing output must not leave undone, or the node itself.
    then: Callable[[Node], Any] | None = None

    def __post_init__(self) -> None:
        if not (self.name.isascii() and self.name.isidentifier()):
            raise InputError(
                f"step {self.function.__qualname__!a}: its name {self.name!a} becomes the name of "
                "a directory; use letters a-z, digits and _"
            )
        vars(self).update({"__doc__": self.function.__doc__, "__wrapped__": self.function})
        source_code.remember()
        _ = self.signature  # read now, so that an error points at the step's declaration

    @functools.cached_property
    def signature(self) -> Signature:
        return read_signature(self.function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> A:
        try:
            bound = self.signature.parameters.bind(*args, **kwargs)
        except TypeError as error:
            raise InputError(f"{self.name}(): {error}") from None
        bound.apply_defaults()
        for name, external in self.signature.externals.items():
            value = bound.arguments[name]
            expected = self.signature.inputs.get(name)
            if expected and not isinstance(value, str | Node | None):
                raise self._refusal(name, f"{expected.kind.__name__} or a source", value)
            if value is not None and not isinstance(value, Node):
                bound.arguments[name] = external.absolute(value)
        inputs, config, runtime = {}, {}, {}
        for name, value in bound.arguments.items():
            expected = self.signature.inputs.get(name)
            if expected and (isinstance(value, Node) or value is None or not expected.or_value):
                inputs |= dict(self._input_nodes(name, value))
            elif isinstance(value, Node):
                raise self._refusal(name, "a configuration value", value)
            elif not isinstance(value, kind := self.signature.classes.get(name, object)):
                raise self._refusal(name, kind.__name__, value)
            else:
                (runtime if name in self.signature.runtime else config)[name] = value
        try:
            if self.check is not None:
                self.check(bound.arguments)
        except (TypeError, ValueError, AttributeError) as error:
            # A check assumes the annotated types, so such an error means an argument of another.
            raise InputError(f"{self.name}(...): {error}; see its arguments' types") from error
        node = Node(self, inputs, config, runtime)
        return typing.cast(A, node if self.then is None else self.then(node))

    def _input_nodes(self, name: str, value: Any) -> Iterator[tuple[str, Node]]:
        expected = self.signature.inputs[name]
        if expected.many:
            if not isinstance(value, tuple | list) or not value:
                raise self._refusal(name, f"one or more {expected.kind.__name__}", value)
            for index, item in enumerate(value):
                yield f"{name}[{index}]", self._check_input(f"{name}[{index}]", expected, item)
        elif value is not None or not expected.optional:
            yield name, self._check_input(name, expected, value)

    def _check_input(self, name: str, expected: InputType, value: Any) -> Node:
        if isinstance(value, Node) and issubclass(value.output, expected.kind):
            return value
        raise self._refusal(name, expected.kind.__name__, value)

    def _refusal(self, name: str, expected: str, value: Any) -> InputError:
        found = f"{value!r} of type {type(value).__name__}"
        if isinstance(value, Node):
            found = f"{value.output.__name__} (the output of step {value.label!r})"
        return InputError(f"{self.name}({name}=...): expected {expected}, got {found}")

    def __reduce__(self) -> Any:
        # A worker imports the step by name, unless its file is not sent to workers.
        if by_value(self.function):
            fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
            return (functools.partial(type(self), **fields), ())
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
    shard_cpus: float = 1,
    shard_memory: int = 0,
    **more: Any,
) -> Callable[[Callable[Concatenate[StepContext, P], Result]], StepSpec[P, A]]:
    """Declare a step that publishes an artifact of class `output`.

    Args:
        version: part of the key; raise it when the code changes the output, or when the meaning of
            a default changes.
        name: by default the function's name, without its module.
        cpus: see `Resources`, also for the next five; for `more` see `StepSpec`.
    """
    resources = Resources(cpus, memory, custom or {}, tries, shard_cpus, shard_memory)

    def declare(function: Callable[Concatenate[StepContext, P], Result]) -> StepSpec[P, A]:
        return StepSpec(function, output, version, name or function.__name__, resources, **more)

    return declare
