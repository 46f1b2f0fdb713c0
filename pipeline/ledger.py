"""The ledger of a step: one record per finished shard, shared by all attempts at the step.

A shard is finished when its record exists, and a record is created only after the shard's files
are written and digested. A new attempt finds the records of a dead one and does not redo them; of
two writers of one shard, the first record stands and the other's files are left to be discarded.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from pipeline import storage
from pipeline.errors import DamagedOutput, StorageError
from pipeline.manifest import File, Shard

_DIRECTORY = "ledger"


class Ledger:
    """The finished shards of the step in directory `root`."""

    def __init__(self, root: str) -> None:
        self.root = root

    def _record(self, name: str) -> str:
        return storage.join(self.root, _DIRECTORY, name.replace("/", "~") + ".json")

    def finished(self, prefix: str = "") -> dict[str, Shard]:
        """Finished shards by name, those starting with `prefix`, in order of name.

        Raises:
            DamagedOutput: when a record cannot be read.
        """
        names = storage.list_names(storage.join(self.root, _DIRECTORY))
        wanted = [n.removesuffix(".json").replace("~", "/") for n in names if n.endswith(".json")]
        return {name: self.read(name) for name in wanted if name.startswith(prefix)}

    def read(self, name: str) -> Shard:
        """The record of one finished shard. Raises `FileNotFoundError` or `DamagedOutput`."""
        url = self._record(name)
        try:
            return Shard.from_json(storage.read_json(url))
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedOutput(
                f"{url}: not a shard record ({error!r}); delete it to redo the shard"
            ) from error

    def add(self, name: str, directory: str, result: Mapping[str, Any]) -> Shard:
        """Record that the files under `directory` are shard `name`; returns the record that stands.

        `directory` is a URL inside the step's directory. Every file is read once for its digest.
        """
        base = self.root.rstrip("/") + "/"
        if not directory.startswith(base):
            raise StorageError(f"shard {name}: expected a directory under {base}, got {directory}")
        files = tuple(
            File(path, size, storage.sha256(storage.join(directory, path)))
            for path, size in storage.list_files(directory)
        )
        shard = Shard(name, directory.removeprefix(base), files, dict(result))
        record = json.dumps(dataclasses.asdict(shard), sort_keys=True).encode()
        if storage.create(self._record(name), record):
            return shard
        return self.read(name)

    def drop(self, name: str) -> None:
        """Forget a shard; before its files go, so that no reader finds a record without them."""
        storage.delete_tree(self._record(name))
