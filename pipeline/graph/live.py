"""Inputs that are read while they are still being made.

    def follow(run: StepContext, model: Annotated[Checkpoint, Live], ...) -> Result:
        model_so_far = Live.of(model)

To whoever builds the graph such an argument is an input like any other, and its key is part of the
step's key. The executor starts the step as soon as the input's own step is at work, and the body is
given a `Live` in its place: the shards finished so far, and the artifact once it is published. The
body ends after that, and the manifest records the input's content as it then is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from pipeline.errors import InputError
from pipeline.graph.artifact import Artifact
from pipeline.store import manifest, storage
from pipeline.store.ledger import Ledger
from pipeline.store.manifest import Shard

A = TypeVar("A", bound=Artifact)
B = TypeVar("B", bound=Artifact)


@dataclass(frozen=True)
class Source:
    """Where a step that is being followed works.

    Attributes:
        build: id of the build, whose ledger it writes to.
        replaces: attempt of the output that its build takes the place of; empty for none.
        arguments: what it was called with, configuration and runtime settings.
    """

    build: str
    replaces: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Live(Generic[A]):
    """An input that may still be made; also the mark in an annotation that asks for one.

    Picklable, so that the processes of a gang can look for themselves.

    Attributes:
        kind: class of the artifact.
        path: URL of its step's directory; `key`: its step's key.
        source: how its step works.
    """

    kind: type[A]
    path: str
    key: str
    source: Source

    @staticmethod
    def of(argument: B) -> Live[B]:
        """What the body was given for an argument marked `Annotated[Kind, Live]`.

        Raises:
            InputError: when the argument is not marked so.
        """
        if not isinstance(argument, Live):
            raise InputError(
                f"expected a live input, got {argument!r}; annotate the argument with "
                "Annotated[Kind, Live]"
            )
        return cast("Live[B]", argument)

    def published(self) -> A | None:
        """The artifact, once it is there; its shards are final then.

        Raises:
            CorruptOutput: when what is there is not what was recorded.
        """
        found = manifest.load_built(self.path, self.key, self.source.replaces)
        return self.kind(self.path, found) if found is not None else None

    def shards(self, prefix: str = "") -> dict[str, Shard]:
        """Shards finished so far, by name; some may be dropped again before it is published."""
        return self._ledger.finished(prefix)

    def find(self, name: str) -> Shard | None:
        """One shard, None when it is not finished or was dropped; lists nothing."""
        return self._ledger.find(name)

    def url(self, shard: Shard) -> str:
        """URL of the directory of a shard that is not published yet."""
        return storage.join(self.path, shard.root)

    @property
    def _ledger(self) -> Ledger:
        return Ledger(self.path, self.source.build)
