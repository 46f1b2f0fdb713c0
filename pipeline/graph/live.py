"""Live inputs: inputs that a step reads while they are still being built.

    def follow(run: StepContext, model: Annotated[Checkpoint, Live], ...) -> Result:
        model_so_far = Live.of(model)

In the graph such an argument is an input like any other, and its key is part of the step's key. The
executor starts the step as soon as the input's own step is at work, and passes the body a `Live`
instead of the artifact: the shards finished so far, and the artifact once it is published. The body
must end after that publication, and the manifest records the content of the published input.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from pipeline.errors import InputError
from pipeline.graph.artifact import Artifact
from pipeline.store import manifest, storage
from pipeline.store.ledger import Ledger
from pipeline.store.shards import Shard

A = TypeVar("A", bound=Artifact)
B = TypeVar("B", bound=Artifact)


@dataclass(frozen=True)
class Source:
    """The build of a live input.

    Attributes:
        replaces: attempt of the published output that the build replaces; empty for none.
        arguments: arguments of its step: configuration and runtime settings.
    """

    build: str
    replaces: str
    arguments: Mapping[str, Any]


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
        found = manifest.load_built(self.path, self.key, self.source.replaces)
        return self.kind(self.path, found) if found is not None else None

    def shards(self, prefix: str = "") -> dict[str, Shard]:
        """Shards finished so far, by name; the step may still drop some before it publishes."""
        return self._ledger.finished(prefix)

    def find(self, name: str) -> Shard | None:
        """One shard, None when it is not finished or was dropped; reads its record, no listing."""
        return self._ledger.find(name)

    def url(self, shard: Shard) -> str:
        return storage.join(self.path, shard.root)

    @property
    def _ledger(self) -> Ledger:
        return Ledger(self.path, self.source.build)
