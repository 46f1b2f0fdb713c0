"""Typed artifacts: a finished step's output, as a place and the code that opens it.

A step library derives a class per kind of output (`Documents`, `TokenCache`, ...) and gives it the
methods that read it. While a graph is being built the class is only a type: the checker sees it,
and a step refuses an input of another class.
"""

from __future__ import annotations

from typing import Any

from pipeline import storage
from pipeline.manifest import Manifest, Shard


class Artifact:
    """A published output. `path` is the step's directory, `manifest` what was published there."""

    def __init__(self, path: str, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest

    @property
    def result(self) -> dict[str, Any]:
        """The JSON mapping the step returned: counts, losses, digests."""
        return self.manifest.result

    def shard(self, name: str) -> str:
        """URL of the directory of one shard. Raises `KeyError` when there is no such shard."""
        return storage.join(self.path, self.manifest.shard(name).root)

    def shards(self, prefix: str = "") -> list[Shard]:
        """The shards whose name starts with `prefix`, in order of name."""
        return [shard for shard in self.manifest.shards if shard.name.startswith(prefix)]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.path!r})"
