"""Cheap digests of local files: of all bytes of a small file, of samples of a large one.

A file of up to `WHOLE` bytes is digested whole. For a larger one the digest covers the size, 16
blocks spread over the file and, for Parquet, the footer, which has the offsets and sizes of all
pages and the minima and maxima of their values, so a rewritten file has another digest. An edit of
a few bytes in a large file that changes neither size nor footer is detected only inside a block.

Digests are cached by path, size, times and inode in the user's cache directory, so that planning
over ten thousand files reads none of them twice. Losing the cache only costs time.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pipeline.errors import InputError

WHOLE = 4 << 20
BLOCKS = 16
BLOCK = 16 << 10
_PARQUET = b"PAR1"
_LONGEST_FOOTER = 64 << 20
_AT_ONCE = 8
_PARTS = 64  # parts of the list of files, each digested by one thread
_WORTH_KEEPING = 16 << 20  # bytes read after which the cache is written
_SETTLED_SECONDS = 2.0  # a younger file may change again within one tick of the timestamps
_NOTICE_SECONDS = 5.0

logger = logging.getLogger("ponente")

_Mark = list[int]  # size, time of change of content and of inode, inode


def digest_files(paths: Iterable[str]) -> dict[str, tuple[int, str]]:
    """(size, digest) of each file, by path.

    Raises:
        InputError: a file is missing or cannot be read.
    """
    paths = list(paths)
    cache = _cache_file(paths)
    known = _load(cache)
    found: dict[str, tuple[_Mark, str]] = {}
    read, noticed = 0, time.monotonic() + _NOTICE_SECONDS
    step = max(1, len(paths) // _PARTS)
    parts = [paths[first : first + step] for first in range(0, len(paths), step)]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for digests in pool.map(lambda part: [_digest(p, known.get(p)) for p in part], parts):
            for path, mark, digest, size in digests:
                found[path], read = (mark, digest), read + size
            if time.monotonic() > noticed:
                noticed = time.monotonic() + _NOTICE_SECONDS
                logger.warning("digests of source files: %d of %d", len(found), len(paths))
    if read > _WORTH_KEEPING:
        _save(cache, found)
    return {path: (mark[0], digest) for path, (mark, digest) in found.items()}


def _digest(path: str, known: tuple[_Mark, str] | None) -> tuple[str, _Mark, str, int]:
    """(path, mark, digest, bytes read)."""
    try:
        with open(path, "rb") as file:
            stat = os.fstat(file.fileno())
            mark = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
            if known is not None and known[0] == mark:
                return path, mark, known[1], 0
            return path, mark, *_content(file.fileno(), stat.st_size)
    except OSError as error:
        raise InputError(
            f"{path}: expected a file that can be read, found {error.strerror or error}; "
            "check the source"
        ) from None


def _content(file: int, size: int) -> tuple[str, int]:
    """(BLAKE2b-128 of size and ranges, bytes read) of an open file."""
    digest = hashlib.blake2b(f"{size}:".encode(), digest_size=16)
    ranges = [(0, size)]
    if size > WHOLE:
        last = size - BLOCK
        ranges = [(last * index // (BLOCKS - 1), BLOCK) for index in range(BLOCKS)]
        tail = os.pread(file, 8, size - 8)
        footer = int.from_bytes(tail[:4], "little")
        if tail[4:] == _PARQUET and footer <= min(_LONGEST_FOOTER, size - 8):
            ranges.append((size - 8 - footer, footer))
    for start, length in ranges:
        while length and (piece := os.pread(file, min(length, WHOLE), start)):
            digest.update(piece)
            start, length = start + len(piece), length - len(piece)
    return digest.hexdigest(), sum(length for _, length in ranges)


def _cache_file(paths: list[str]) -> Path:
    folder = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    common = os.path.commonpath([os.path.dirname(path) for path in paths] or ["/"])
    name = hashlib.blake2b(os.fsencode(common), digest_size=16).hexdigest()
    return Path(folder) / "ponente" / "digests" / f"{name}.json"


def _load(cache: Path) -> dict[str, tuple[_Mark, str]]:
    try:
        tree = json.loads(cache.read_bytes())
        return {str(path): (list(mark), str(digest)) for path, (mark, digest) in tree.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _save(cache: Path, found: dict[str, tuple[_Mark, str]]) -> None:
    latest = (time.time() - _SETTLED_SECONDS) * 1e9
    kept = {p: entry for p, entry in found.items() if max(entry[0][1:3]) < latest}
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=cache.parent, delete=False) as file:
            json.dump(kept, file)
        os.replace(file.name, cache)
    except OSError as error:
        logger.debug("digests of source files are not cached: %s", error)
