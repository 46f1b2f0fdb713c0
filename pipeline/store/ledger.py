"""The ledger of a step: one record per finished shard, shared by attempts at the same thing.

A shard is finished when its record exists, and a record is created only after the shard's files
are written and digested. A new attempt finds the records of a dead one and does not redo them; of
two writers of one shard, the first record stands and the other's files are left to be discarded.

Records are kept by generation: what is being built, from which contents. A rebuild, or a build over
inputs that changed meanwhile, starts a ledger of its own, so shards of two things never mix.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.errors import CorruptOutput, InputError, StorageError
from pipeline.identity import fingerprint
from pipeline.store import integrity, storage
from pipeline.store.manifest import File, Shard

DIRECTORY = "ledger"


@dataclass(frozen=True)
class Ledger:
    """The finished shards of the step in directory `root`, for one generation of it."""

    root: str
    generation: str = "first"

    def record(self, name: str) -> str:
        """URL of the record of a shard.

        Raises:
            InputError: for a name that cannot be a path, or shares its record with another's.
        """
        storage.join(self.root, name)
        if "~" in name:
            raise InputError(f"shard {name!r}: '~' stands for '/' in the ledger; leave it out")
        return storage.join(self.root, DIRECTORY, self.generation, name.replace("/", "~") + ".json")

    def finished(self, prefix: str = "") -> dict[str, Shard]:
        """Finished shards by name, those starting with `prefix`, in order of name.

        Raises:
            CorruptOutput: when a record cannot be read.
        """
        names = storage.list_names(storage.join(self.root, DIRECTORY, self.generation))
        wanted = [n.removesuffix(".json").replace("~", "/") for n in names if n.endswith(".json")]
        # A listing may still show a record that was dropped.
        found = {name: self.find(name) for name in wanted if name.startswith(prefix)}
        return {name: shard for name, shard in found.items() if shard is not None}

    def find(self, name: str) -> Shard | None:
        """The record of one shard, None when it is not finished; asks for it, lists nothing."""
        try:
            return self.read(name)
        except FileNotFoundError:
            return None

    def names(self) -> frozenset[str]:
        """What is in the ledger's directory, unread; a shard that is finished adds a name."""
        return frozenset(storage.list_names(storage.join(self.root, DIRECTORY, self.generation)))

    def count(self) -> tuple[int, int]:
        """(finished, expected) shards; expected is 0 while nobody has said."""
        names = self.names()
        expected = [int(n.split("-")[1]) for n in names if n.endswith("-.expected")]
        return sum(n.endswith(".json") for n in names), sum(expected)

    def expect(self, names: Iterable[str]) -> None:
        """Say which shards will come, so that others can tell n of m."""
        wanted = sorted(names)
        mark = f"{fingerprint.digest(wanted)[:8]}-{len(wanted)}-.expected"
        storage.create(
            storage.join(self.root, DIRECTORY, self.generation, mark), b"", durable=False
        )

    def read(self, name: str) -> Shard:
        """The record of one finished shard. Raises `FileNotFoundError` or `CorruptOutput`."""
        url = self.record(name)
        try:
            shard = Shard.from_json(storage.read_json(url))
            if shard.name != name:
                raise ValueError(f"the record of shard {shard.name!r}")
            return shard
        except ValueError as error:
            raise CorruptOutput(
                f"{url}: not a shard record ({error!r}); delete it to redo the shard"
            ) from error

    def add(
        self,
        name: str,
        directory: str,
        result: Mapping[str, Any],
        measured: Iterable[File] = (),
    ) -> Shard:
        """Record that the files under `directory` are shard `name`; returns the record that stands.

        Args:
            name: of the shard.
            directory: a URL inside the step's directory.
            result: what the shard says of itself.
            measured: files whose digests were taken while they were written, not read again; each
                must be there with its size. Every other file is read once for its digest.

        Raises:
            StorageError: the directory is not the step's, or a measured file is not as it was.
        """
        base = self.root.rstrip("/") + "/"
        if not directory.startswith(base):
            raise StorageError(f"shard {name}: expected a directory under {base}, got {directory}")
        known = {file.path: file for file in measured}
        found = dict(storage.list_files(directory))
        for path, file in known.items():
            if found.get(path) != file.size:
                raise StorageError(
                    f"shard {name}: {directory}/{path}: expected {file.size} bytes, just written, "
                    f"found {found.get(path, 'no file')}; check the storage and run again"
                )
        files = tuple(known.get(path) or integrity.measure(directory, path) for path in found)
        shard = Shard(name, directory.removeprefix(base), files, dict(result))
        record = json.dumps(dataclasses.asdict(shard), sort_keys=True).encode()
        if storage.create(self.record(name), record):
            return shard
        return self.read(name)

    def drop(self, name: str) -> None:
        """Forget a shard; before its files go, so that no reader finds a record without them."""
        storage.delete_tree(self.record(name))
