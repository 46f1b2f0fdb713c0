"""The ledger of a build: one record per finished shard, shared by all attempts of the build.

A shard is finished when its record exists, and a record is created only after the shard's files are
written and digested. Of two writers of one shard, the first record is kept. Only the owner may drop
a shard, and a newer attempt becomes the owner by `claim`, a compare-and-swap: so an attempt that
was paused and replaced cannot delete shards that its successor uses.

On an object store, an attempt that had to read many records one by one leaves copies of them, many
in one object, for the attempt after it. A copy counts while the record's object has the size and
the time that it had when it was copied.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any

import msgspec

from pipeline.errors import CorruptOutput, InputError, StorageError, WorkerLost
from pipeline.identity import fingerprint
from pipeline.store import integrity, storage
from pipeline.store.decode import Stored, decode, parse_json, plain_result, to_json
from pipeline.store.parallel import by_item, in_order
from pipeline.store.shards import ATTEMPTS, File, Shard

DIRECTORY = "ledger"
_COPIES = "-.records"  # end of the names of objects with copies; no shard's record has it
_MANY = 512  # from so many records on, copies are read and left
_TOGETHER = 1000  # most records in one object
_Version = tuple[int, float | None]  # size and time of the last write of an object
_Copy = tuple[str, _Version, str]  # name of the shard, version of its record, the record


class Record(Stored, frozen=True):
    """A finished shard, the attempt that may drop it, and the digest of the code that wrote it."""

    owner: str
    shard: Shard
    code: str = ""


@dataclass(frozen=True)
class Ledger:
    """The finished shards of one build of the step in directory `root`.

    Attributes:
        code: digest of the step's code, of which `finished` and `add` reuse shards; empty for any.
        keep: reuse shards of other code too.
    """

    root: str
    build: str = "first"
    code: str = ""
    keep: bool = False

    @property
    def directory(self) -> str:
        return storage.join(self.root, DIRECTORY, self.build)

    def record(self, name: str) -> str:
        storage.join(self.root, name)
        if "~" in name:
            raise InputError(f"shard {name!r}: '~' stands for '/' in the ledger; leave it out")
        return storage.join(self.directory, _file(name))

    def finished(self, prefix: str = "") -> dict[str, Shard]:
        """Finished shards by name: those starting with `prefix` that are reused, sorted."""
        names = [name for name in self.shard_names() if name.startswith(prefix)]
        return {n: found.shard for n, found in self.records(names).items() if self.reuses(found)}

    def records(self, names: Iterable[str], *, copy: bool = False) -> dict[str, Record]:
        """Records by name, sorted, of shards of any code; those that are gone are left out.

        With `copy`, leaves copies of many records that were read one by one.
        """
        wanted = set(names)
        few = len(wanted) < _MANY or storage.is_local(self.root)
        versions = {} if few else storage.inventory(self.directory)
        found = self._copies(versions, wanted)
        alone = sorted(wanted - found.keys())
        # A listing may still show a record that was dropped.
        read = by_item(self.look, alone, self.root)
        new = {name: record for name, record in read.items() if record is not None}
        if copy and versions and len(new) >= _MANY:
            self._copy(new, versions)
        return dict(sorted((found | new).items()))

    def _copies(self, versions: Mapping[str, _Version], wanted: Set[str]) -> dict[str, Record]:
        found = {}
        urls = [storage.join(self.directory, n) for n in versions if n.endswith(_COPIES)]
        for data in in_order(storage.read_bytes, urls, self.root):
            with contextlib.suppress(ValueError, CorruptOutput):  # then the records are read
                for name, version, text in msgspec.convert(parse_json(data), list[_Copy]):
                    if name in wanted and versions.get(_file(name)) == version:
                        found[name] = self._parse(name, text.encode())
        return found

    def _copy(self, records: Mapping[str, Record], versions: Mapping[str, _Version]) -> None:
        # They were listed before they were read: one that was replaced in between has the new
        # content under the old version, which is listed no more.
        known = [
            [name, versions[_file(name)], to_json(record).decode()]
            for name, record in records.items()
            if versions.get(_file(name), (0, None))[1] is not None
        ]
        for begin in range(0, len(known), _TOGETHER):
            data = to_json(known[begin : begin + _TOGETHER])
            name = f"{hashlib.sha256(data).hexdigest()[:16]}{_COPIES}"
            storage.create(storage.join(self.directory, name), data, durable=False)

    def reuses(self, record: Record) -> bool:
        return self.keep or self.code == record.code or "" in (self.code, record.code)

    def find(self, name: str) -> Shard | None:
        """One shard of any code, None when it is not finished; reads its record, no listing."""
        found = self.look(name)
        return found.shard if found is not None else None

    def look(self, name: str) -> Record | None:
        try:
            return self._parse(name, storage.read_bytes(self.record(name)))
        except FileNotFoundError:
            return None

    def names(self) -> frozenset[str]:
        """Names of all objects in the ledger's directory; every finished shard adds one."""
        return frozenset(storage.list_names(self.directory))

    def shard_names(self) -> frozenset[str]:
        return frozenset(shard_of(name) for name in self.names() if name.endswith(".json"))

    def count(self) -> tuple[int, int]:
        """(finished, expected) shards; expected is 0 until `expect` was called."""
        names = self.names()
        expected = [int(n.split("-")[1]) for n in names if n.endswith("-.expected")]
        return sum(n.endswith(".json") for n in names), sum(expected)

    def expect(self, names: Iterable[str]) -> None:
        """Record how many shards the build will have, for `count`."""
        wanted = sorted(names)
        mark = f"{fingerprint.digest(wanted)[:8]}-{len(wanted)}-.expected"
        storage.create(storage.join(self.directory, mark), b"", durable=False)

    def _parse(self, name: str, data: bytes) -> Record:
        try:
            found = decode(Record, parse_json(data))
            found.shard.check()
            if found.shard.name != name:
                raise ValueError(f"the record of shard {found.shard.name!r}")
            return found
        except ValueError as error:
            raise CorruptOutput(
                f"{self.record(name)}: not a shard record ({error!r}); delete it to redo the shard"
            ) from error

    def add(
        self,
        name: str,
        directory: str,
        result: Mapping[str, Any],
        measured: Iterable[File] = (),
        *,
        replace: bool = False,
    ) -> Shard:
        """Record the files under `directory` as shard `name`; returns the shard that is recorded.

        A record that is there already stays, unless it is one of other code, or `replace` is given.
        Of files that were `measured` while they were written only the sizes are compared; every
        other file is read once for its digest. `WorkerLost` when a newer attempt owns the shard.
        """
        shard = self._measure(name, directory, result, measured)
        new = Record(shard.attempt, shard, self.code)
        while not storage.create(self.record(name), to_json(new)):
            found, version = self._versioned(name)
            if found is None:
                continue
            if not replace and self.reuses(found):
                return found.shard
            self._check_owner(name, found.owner, new.owner)
            if storage.replace_if(self.record(name), to_json(new), version):
                break
        return shard

    def _versioned(self, name: str) -> tuple[Record | None, str]:
        try:
            data, version = storage.read_versioned(self.record(name))
        except FileNotFoundError:
            return None, ""
        return self._parse(name, data), version

    def claim(self, name: str, attempt: str) -> Shard | None:
        """Make `attempt` the owner of a finished shard of any code; None when it was dropped.

        Raises `WorkerLost` when a newer attempt owns it.
        """
        return self._swap(name, attempt, drop=False)

    def drop(self, name: str, attempt: str) -> None:
        """Delete a shard's record, before its files; `WorkerLost` when a newer attempt owns it."""
        self._swap(name, attempt, drop=True)

    def _swap(self, name: str, attempt: str, *, drop: bool) -> Shard | None:
        while True:
            found, version = self._versioned(name)
            if found is None:
                return None
            self._check_owner(name, found.owner, attempt)
            new = None if drop else to_json(msgspec.structs.replace(found, owner=attempt))
            if (found.owner == attempt and not drop) or storage.replace_if(
                self.record(name), new, version
            ):
                return found.shard

    def _check_owner(self, name: str, owner: str, attempt: str) -> None:
        if age_of(owner) > age_of(attempt):
            raise WorkerLost(
                f"{self.root}: attempt {owner} took over shard {name!r}; attempt {attempt} ends"
            )

    def _measure(
        self, name: str, directory: str, result: Mapping[str, Any], measured: Iterable[File]
    ) -> Shard:
        base = self.root.rstrip("/") + "/"
        if not directory.startswith(f"{base}{ATTEMPTS}/"):
            raise StorageError(
                f"shard {name}: expected a directory in an attempt of {base}, got {directory}"
            )
        known = {file.path: file for file in measured}
        found = dict(storage.list_files(directory))
        for path, file in known.items():
            if found.get(path) != file.size:
                raise StorageError(
                    f"shard {name}: {directory}/{path}: expected {file.size} bytes, just written, "
                    f"found {found.get(path, 'no file')}; check the storage and run again"
                )
        files = tuple(
            known.get(path) or integrity.measure(directory, path, size)
            for path, size in found.items()
        )
        return Shard(name, directory.removeprefix(base), files, plain_result(result))


def shard_of(record: str) -> str:
    return record.removesuffix(".json").replace("~", "/")


def _file(name: str) -> str:
    return name.replace("/", "~") + ".json"


def age_of(attempt: str) -> tuple[int, str]:
    """Sort key that orders attempts by age: their names begin with the number of their lease."""
    number = attempt.partition("-")[0]
    return (int(number) if number.isdecimal() else 0, attempt)
