"""Checksums of a file and of its blocks, and the byte ranges that no longer match them."""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Iterable, Iterator

from pipeline.errors import CorruptOutput
from pipeline.store import storage
from pipeline.store.manifest import Manifest
from pipeline.store.parallel import concurrently, list_together
from pipeline.store.shards import File, Shard, ShardTable, file_url

_BLOCK = 1 << 20
_SMALL = 4 << 20


def measure(directory: str, path: str, listed: int | None = None) -> File:
    """Size, SHA-256 and block checksums of the file `path` under `directory`, read once.

    A file that is small by its size in a listing, if given, is read by one request.
    """
    digest, sums, size = hashlib.sha256(), [], 0
    for block in _blocks(storage.join(directory, path), listed):
        digest.update(block)
        sums.append(f"{zlib.crc32(block):08x}")
        size += len(block)
    return File(path, size, digest.hexdigest(), "".join(sums) if len(sums) > 1 else "")


def _blocks(url: str, size: int | None) -> Iterator[bytes]:
    if size is not None and size <= _SMALL:
        data = storage.read_bytes(url)
        for start in range(0, len(data), _BLOCK):
            yield data[start : start + _BLOCK]
        return
    with storage.open_read(url) as file:
        while block := file.read(_BLOCK):
            yield block


def problems(path: str, manifest: Manifest) -> Iterator[str]:
    """One line for each file or byte range of an output that differs from its manifest.

    Files that are not in the manifest are reported too; nothing reads them.
    """
    home = manifest.home(path)
    if isinstance(manifest.shards, ShardTable):
        try:
            manifest.shards.check()
        except CorruptOutput as error:
            yield str(error)
            return
    listed = None if storage.is_local(home) else _by_root(home, manifest.shards)

    def of_shard(shard: Shard) -> list[str]:
        recorded = {file.path for file in shard.files}
        if listed is None:
            found = dict(storage.list_files(storage.join(home, shard.root)))
        else:
            found = listed[shard.root]
        lines = []
        for file in shard.files:
            lines += _file_problems(file_url(home, shard, file), file, found.get(file.path))
        for name in sorted(found.keys() - recorded):
            lines.append(f"{storage.join(home, shard.root, name)}: not recorded, and never read")
        return lines

    for lines in concurrently(of_shard, manifest.shards, home):
        yield from lines


def _by_root(home: str, shards: Iterable[Shard]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {shard.root: {} for shard in shards}
    for name, size in list_together(home, found).items():
        for slash in re.finditer("/", name):
            if (under := found.get(name[: slash.start()])) is not None:
                under[name[slash.end() :]] = size
    return found


def _file_problems(url: str, file: File, found: int | None = None) -> Iterator[str]:
    # A listing may be out of date: if it disagrees, the store is asked for the object itself.
    found = storage.size(url) if found != file.size else found
    if found is None:
        yield f"{url}: missing, expected {file.size} bytes"
        return
    digest, wrong = hashlib.sha256(), []
    for index, block in enumerate(_blocks(url, found)):
        digest.update(block)
        start = index * _BLOCK
        expected = file.blocks[8 * index : 8 * index + 8]  # 8 hex digits of CRC-32 per block
        if start < file.size and expected and f"{zlib.crc32(block):08x}" != expected:
            wrong.append((start, min(start + _BLOCK, file.size)))
    if found != file.size:
        yield f"{url}: {found} bytes, expected {file.size}"
    if digest.hexdigest() != file.sha256:
        for start, end in _merged(wrong) or [(0, file.size)]:
            if start < found:
                yield f"{url}: bytes {start}-{min(end, found) - 1} are not what was written"


def _merged(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, end in ranges:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged
