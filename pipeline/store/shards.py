"""The shards of an output and their files, and the table that lists them when they are many.

A manifest contains up to `INLINE` shards itself. More are in a table: a file of JSON lines in the
attempt that published, one line per shard, sorted by name. The manifest has its path and SHA-256;
it is written before, never changed, and read when a shard is first asked for, once per process.
"""

from __future__ import annotations

import array
import errno
import functools
import hashlib
import itertools
import json
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, overload

import msgspec

from pipeline.errors import CorruptOutput, InputError, StoreUnavailable
from pipeline.store import storage
from pipeline.store.decode import Stored, to_json
from pipeline.store.parallel import list_together

INLINE = 64  # most shards that a manifest has in itself, for one request instead of two
ATTEMPTS = "attempts"
Size = Annotated[int, msgspec.Meta(ge=0)]
Sha256 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
_TABLE = "shards.jsonl"
_LASTING = (errno.EACCES, errno.EPERM, errno.ELOOP)  # of the file itself, and no failure of a disk
_CACHED = 4  # tables in memory, about 1 kB for each shard of a token cache
_LIST_FROM = 4  # from this many files on, one listing replaces a request per file
_Line = tuple[str, str, dict[str, Any], tuple[tuple[str, Size, Sha256, str], ...]]
_decoder = msgspec.json.Decoder(_Line)


class File(Stored, frozen=True):
    """A file of a shard; `blocks` has the CRC-32 of every block of 1 MiB, if there are several."""

    path: str
    size: Size
    sha256: Sha256
    blocks: str


class Shard(Stored, frozen=True):
    """A finished shard; `root` is the directory of its files, relative to the step's directory."""

    name: str
    root: str
    files: tuple[File, ...]
    result: dict[str, Any]

    @property
    def attempt(self) -> str:
        return self.root.split("/")[1]

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)

    def check(self) -> None:
        """Raise `ValueError` for a path outside the attempts, and for a duplicate file."""
        try:
            if not storage.join("", self.root).startswith(f"/{ATTEMPTS}/"):
                raise InputError(f"expected a directory in an attempt, got {self.root!r}")
            for file in self.files:
                _check_path(file.path)
        except InputError as error:
            raise ValueError(str(error)) from None
        if len({file.path for file in self.files}) != len(self.files):
            raise ValueError(f"shard {self.name!r}: duplicate file")


# The shards of an output have files of the same names.
_check_path = functools.lru_cache(1 << 12)(functools.partial(storage.join, ""))


class Table(Stored, frozen=True):
    """A manifest's table of many shards: its path, size and digest; shards and bytes in it."""

    path: str
    size: Size
    sha256: Sha256
    shards: Size
    bytes: Size

    def __post_init__(self) -> None:
        Shard("", self.path, (), {}).check()


@dataclass(frozen=True)
class ShardTable(Sequence[Shard]):
    """The shards in a table, sorted by name; each is decoded when it is asked for.

    Every access raises `CorruptOutput` when the table is not the one recorded, and
    `StoreUnavailable` when its store cannot be reached.
    """

    home: str
    name: str
    table: Table

    def check(self) -> None:
        """Read the table from the store, also if this process has it. Raises as any access."""
        self._read(_read.__wrapped__)

    def names(self) -> list[str]:
        return self._rows.names

    def __len__(self) -> int:
        return self.table.shards

    @overload
    def __getitem__(self, index: int) -> Shard: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Shard, ...]: ...
    def __getitem__(self, index: int | slice) -> Shard | tuple[Shard, ...]:
        rows = self._rows
        if isinstance(index, slice):
            return tuple(map(self._decode, (rows[i] for i in range(len(self))[index])))
        return self._decode(rows[range(len(self))[index]])

    def __iter__(self) -> Iterator[Shard]:
        return self.onwards(0)

    def onwards(self, index: int) -> Iterator[Shard]:
        rows = self._rows
        return (self._decode(rows[at]) for at in range(index, len(self)))

    @property
    def _rows(self) -> _Rows:
        return self._read(_read)

    def _read(self, read: Callable[[str, Table], _Rows]) -> _Rows:
        try:
            return read(storage.join(self.home, self.table.path), self.table)
        except FileNotFoundError:
            raise self._corrupt(f"missing, expected {self.table.size} bytes") from None
        except (ValueError, OSError) as error:
            raise self._corrupt(str(damage(error))) from error

    def _decode(self, line: bytes) -> Shard:
        try:
            name, root, result, files = _parsed(line)
            shard = Shard(name, root, tuple(File(*file) for file in files), result)
            shard.check()
        except ValueError as error:
            raise self._corrupt(str(error)) from error
        return shard

    def _corrupt(self, problem: str) -> CorruptOutput:
        return CorruptOutput(
            f"{storage.join(self.home, self.table.path)}: {problem}; it lists the output's "
            f"{self.table.shards} shards; build it again with --force {self.name}"
        )


def damage(error: ValueError | OSError) -> BaseException:
    """Why an object cannot be read, without the number of retries.

    Raises the error when it is the store that cannot be reached: the object may be intact.
    """
    reason = error.__cause__ or error.__context__ or error
    lasting = isinstance(reason, OSError) and reason.errno in _LASTING
    if isinstance(error, NotADirectoryError) or (
        isinstance(error, StoreUnavailable) and not lasting
    ):
        raise error
    return reason


def _parsed(line: bytes) -> _Line:
    try:
        return _decoder.decode(line)
    except msgspec.DecodeError:
        # A result may have half of a surrogate pair in a text, which msgspec does not read.
        return msgspec.convert(json.loads(line), _Line)


class _Rows:
    """The lines of a table, and the names of its shards."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._ends = array.array("Q", [0])
        self.names: list[str] = []
        while self._ends[-1] < len(data):
            end = data.index(b"\n", self._ends[-1]) + 1
            begin = self._ends[-1] + len('["')  # a name is plain and has no escapes
            self.names.append(data[begin : data.index(b'"', begin)].decode())
            self._ends.append(end)

    def __getitem__(self, index: int) -> bytes:
        return self._data[self._ends[index] : self._ends[index + 1]]


@functools.lru_cache(_CACHED)
def _read(url: str, table: Table) -> _Rows:
    data = storage.read_bytes(url)
    if hashlib.sha256(data).hexdigest() != table.sha256:
        size = f"{len(data)} bytes, expected {table.size}"
        same = "not the bytes that were written"
        raise ValueError(same if len(data) == table.size else size)
    rows = _Rows(data)
    if len(rows.names) != table.shards or any(a >= b for a, b in itertools.pairwise(rows.names)):
        raise ValueError(f"expected {table.shards} shards sorted by name")
    return rows


def keep_shards(root: str, attempt: str, shards: Sequence[Shard]) -> Sequence[Shard]:
    """The shards, sorted by name, for a manifest in `root`; of many, their table, written now."""
    if len(shards) <= INLINE:
        return shards
    data = b"".join(
        to_json([s.name, s.root, s.result, [[f.path, f.size, f.sha256, f.blocks] for f in s.files]])
        + b"\n"
        for s in shards
    )
    path = f"{ATTEMPTS}/{attempt}/{_TABLE}"
    storage.create(storage.join(root, path), data)
    size = sum(shard.bytes for shard in shards)
    digest = hashlib.sha256(data).hexdigest()
    name = root.rpartition("/")[2]
    return ShardTable(root, name, Table(path, len(data), digest, len(shards), size))


def find(shards: Sequence[Shard], name: str) -> Shard | None:
    at = _place(shards, name)
    found = shards[at] if at < len(shards) else None
    return found if found is not None and found.name == name else None


def starting(shards: Sequence[Shard], prefix: str) -> Iterator[Shard]:
    begin = _place(shards, prefix)
    rest = shards.onwards(begin) if isinstance(shards, ShardTable) else shards[begin:]
    return itertools.takewhile(lambda shard: shard.name.startswith(prefix), rest)


def _place(shards: Sequence[Shard], name: str) -> int:
    if isinstance(shards, ShardTable):
        return bisect_left(shards.names(), name)
    return bisect_left(shards, name, key=lambda shard: shard.name)


def check_sizes(home: str, shards: Iterable[Shard], remedy: str) -> None:
    for _, problem in wrong_sizes(home, shards):
        raise CorruptOutput(f"{problem}; {remedy}")


def wrong_sizes(home: str, shards: Iterable[Shard]) -> Iterator[tuple[Shard, str]]:
    """Shards with a file of another size than recorded, and one line about the first such file."""
    shards = shards if isinstance(shards, Sequence) else tuple(shards)
    files = (file for shard in shards for file in shard.files)
    many = len([*itertools.islice(files, _LIST_FROM)]) == _LIST_FROM
    listed: dict[str, int] = {}
    if many and not storage.is_local(home):
        listed = list_together(home, [shard.root for shard in shards])
    for shard in shards:
        for file in shard.files:
            if listed.get(f"{shard.root}/{file.path}") == file.size:
                continue
            url = file_url(home, shard, file)
            # A listing may be out of date: if it disagrees, the store is asked for the object.
            found = storage.size(url)
            if found != file.size:
                state = "missing" if found is None else f"{found} bytes"
                yield shard, f"{url}: expected {file.size} bytes, found {state}"
                break


def file_url(home: str, shard: Shard, file: File) -> str:
    try:
        return storage.join(home, shard.root, file.path)
    except InputError as error:
        raise CorruptOutput(f"{home}: shard {shard.name!r}: {error}") from error
