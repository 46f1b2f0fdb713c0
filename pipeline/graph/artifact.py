"""Typed artifacts: the location of a step's output, and the code that reads it.

A step library derives one class per kind of output (`Documents`, `TokenCache`, ...) with the
methods that read it. While a graph is being built the class is only a type, which the type checker
checks; a step also refuses an input of another class.

A live input is one that a step reads while it is still being built:

    def follow(run: StepContext, model: Annotated[Checkpoint, Live], ...) -> Result:
        model_so_far = Live.of(model)

In the graph it is an input like any other. The executor starts the step as soon as the input's own
step is at work. The body must end after the input was published, and the manifest records the
content of what was published.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Generic, TypeVar, cast

from pipeline.errors import CorruptOutput, InputError
from pipeline.store import shards, storage
from pipeline.store.ledger import Ledger
from pipeline.store.manifest import Manifest, chosen, load, load_built, resolve_ref
from pipeline.store.parallel import concurrently
from pipeline.store.shards import Shard

A = TypeVar("A", bound="Artifact")
B = TypeVar("B", bound="Artifact")


def argument_of(name: str) -> str:
    """The argument of the input `name`: those of a tuple are named `argument[0]`, ... in keys."""
    return name.partition("[")[0]


class Artifact:
    """A published output.

    Attributes:
        path: URL of the step's directory.
        home: URL of the directory with its files: `path`, or the output it is an alias of.
        opens: inputs of its step that its methods also read (see `input`); their contents are part
            of this artifact's content digest.
        needs: inputs of its step that its users read besides; they are protected with it.
    """

    opens: ClassVar[tuple[str, ...]] = ()
    needs: ClassVar[tuple[str, ...]] = ()

    def __init__(self, path: str, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self.home = manifest.home(path)

    @property
    def result(self) -> dict[str, Any]:
        return self.manifest.result

    @cached_property
    def input_paths(self) -> dict[str, str]:
        """URL of the directory of each input its step read, by name.

        For a selection these are the inputs of the selected candidate.
        """
        path, manifest = chosen(self.path, self.manifest)
        return {
            name: resolve_ref(path, read["directory"]) for name, read in manifest.inputs.items()
        }

    def input(self, name: str, kind: type[A]) -> A:
        """The artifact its step read as input `name`; `CorruptOutput` when it was deleted."""
        if not self.needs_input(name):
            raise AssertionError(f"{type(self).__name__}.opens and .needs do not name {name!r}")
        path = self.input_paths[name]
        found = load(path)
        if found is None:
            raise CorruptOutput(f"{path}: input {name!r} of {self.path} is gone; run again")
        return kind(path, found)

    def inputs(self, argument: str, kind: type[A]) -> list[A]:
        count = sum(argument_of(name) == argument for name in self.input_paths)
        names = [f"{argument}[{index}]" for index in range(count)]
        return concurrently(lambda name: self.input(name, kind), names, self.path)

    @classmethod
    def reads(cls, name: str) -> bool:
        """Whether its methods read this input; inputs of a tuple are named `argument[index]`."""
        return argument_of(name) in cls.opens

    @classmethod
    def needs_input(cls, name: str) -> bool:
        return argument_of(name) in (*cls.opens, *cls.needs)

    @classmethod
    def compared(
        cls, candidates: Sequence[Artifact], by: str, best: int
    ) -> tuple[list[dict[str, Any]], str]:
        """How certain the choice of the candidate `best` by the number at the path `by` is.

        JSON values by name for every candidate, and a sentence for the headline; here nothing.
        """
        return [{} for _ in candidates], ""

    @property
    def page(self) -> str:
        """URL of its HTML page, empty for none; a run copies the page to a short path."""
        return ""

    def shard(self, name: str) -> str:
        return storage.join(self.home, self.manifest.shard(name).root)

    def shards(self, prefix: str = "") -> list[Shard]:
        return list(self.each_shard(prefix))

    def each_shard(self, prefix: str = "") -> Iterator[Shard]:
        """As `shards`, one after the other: of many, only the one in use is in memory."""
        return shards.starting(self.manifest.shards, prefix)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.path!r})"


@dataclass(frozen=True)
class Source:
    """The build of a live input."""

    build: str
    replaces: str  # attempt of the published output that the build replaces; empty for none
    arguments: Mapping[str, Any]  # of its step: configuration and runtime settings


@dataclass(frozen=True)
class Live(Generic[A]):
    """An input that may still be in the making; also the mark in an annotation that requests one.

    Picklable, so that every process of a gang can read it. `path` is its step's directory, `key`
    its step's key.
    """

    kind: type[A]
    path: str
    key: str
    source: Source

    @staticmethod
    def of(argument: B) -> Live[B]:
        """The `Live` that the body received for an argument annotated `Annotated[Kind, Live]`."""
        if not isinstance(argument, Live):
            raise InputError(
                f"expected a live input, got {argument!r}; annotate the argument with "
                "Annotated[Kind, Live]"
            )
        return cast("Live[B]", argument)

    def published(self) -> A | None:
        """The artifact, once it is published and its shards are final; None before."""
        found = load_built(self.path, self.key, self.source.replaces)
        return self.kind(self.path, found) if found is not None else None

    def shards(self, prefix: str = "") -> dict[str, Shard]:
        """Shards finished so far, by name; the step may still drop some before it publishes."""
        return Ledger(self.path, self.source.build).finished(prefix)

    def find(self, name: str) -> Shard | None:
        """One shard, None when it is not finished or was dropped; reads its record, no listing."""
        return Ledger(self.path, self.source.build).find(name)

    def url(self, shard: Shard) -> str:
        return storage.join(self.path, shard.root)
