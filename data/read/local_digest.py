"""Cheap digests of local files: of all bytes of a small file, of samples of a large one.

The samples of a file of more than `WHOLE` bytes are its size, 16 blocks spread over it and, for
Parquet, the footer, which has the offsets, sizes and extreme values of all pages.

Digests are remembered by path, size, times and inode in the user's cache directory. A large file
whose times or inode changed since, but not its samples, is read whole, once: from then on the
digest of all its bytes follows that of its samples, after a `+`. So every edit is noticed; a large
file that was only touched is another file once. Without the cache, as on another machine, samples
are all that is known: see `pipeline.identity.listing`.
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
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from stat import S_ISREG

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


@dataclass(frozen=True)
class _Known:
    """What is remembered of a file."""

    mark: list[int]  # size, time of change of content and of inode, inode
    samples: str  # digest of the samples; of all bytes of a small file
    whole: str = ""  # digest of all bytes of a large file, once written with the same samples
    settled: bool = True  # a younger file may change within a tick of its times

    @property
    def digest(self) -> str:
        return f"{self.samples}+{self.whole}" if self.whole else self.samples


def digest_files(paths: Iterable[str]) -> dict[str, tuple[int, str]]:
    """(size, digest) of each file, by path."""
    paths = list(paths)
    cache = _cache_file(paths)
    known = _load(cache)
    found: dict[str, _Known] = {}
    read, noticed = 0, time.monotonic() + _NOTICE_SECONDS
    step = max(1, len(paths) // _PARTS)
    parts = [paths[first : first + step] for first in range(0, len(paths), step)]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for part in pool.map(lambda part: [_digest(p, known.get(p)) for p in part], parts):
            for path, entry, size in part:
                found[path], read = entry, read + size
            if time.monotonic() > noticed:
                noticed = time.monotonic() + _NOTICE_SECONDS
                logger.warning("digests of source files: %d of %d", len(found), len(paths))
    large = {path: entry for path, entry in found.items() if entry.mark[0] > WHOLE}
    if read > _WORTH_KEEPING or any(known.get(path) != entry for path, entry in large.items()):
        _save(cache, known | found)
    return {path: (entry.mark[0], entry.digest) for path, entry in found.items()}


def _digest(path: str, known: _Known | None) -> tuple[str, _Known, int]:
    """(path, what is known of the file now, bytes read)."""
    try:
        # Opened without waiting for the writer of a named pipe.
        with open(path, "rb", opener=lambda p, flags: os.open(p, flags | os.O_NONBLOCK)) as file:
            stat = os.fstat(file.fileno())
            if not S_ISREG(stat.st_mode):
                raise OSError("a pipe or a device, not a file with an end")
            mark = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
            same = known is not None and known.mark == mark
            if known is not None and same and known.settled:
                return path, known, 0
            settled = max(mark[1:3]) < (time.time() - _SETTLED_SECONDS) * 1e9
            samples, read = _content(file.fileno(), stat.st_size)
            now = _Known(mark, samples, settled=settled)
            again = stat.st_size > WHOLE and known is not None and known.samples == samples
            if again and known is not None and (known.whole or not same):
                file.seek(0)
                whole = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))
                now, read = replace(now, whole=whole.hexdigest()), read + stat.st_size
            return path, now, read
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


def user_cache() -> Path:
    """This project's folder in the user's cache."""
    folder = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(folder) / "ponente"


def _cache_file(paths: list[str]) -> Path:
    common = os.path.commonpath([os.path.dirname(path) for path in paths] or ["/"])
    name = hashlib.blake2b(os.fsencode(common), digest_size=16).hexdigest()
    return user_cache() / "digests" / f"{name}.json"


def _load(cache: Path) -> dict[str, _Known]:
    try:
        tree = json.loads(cache.read_bytes())
        return {str(path): _Known(*entry) for path, entry in tree.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _save(cache: Path, found: dict[str, _Known]) -> None:
    # Of a small file that may still change, nothing is worth remembering.
    kept = {p: astuple(e) for p, e in found.items() if e.settled or e.mark[0] > WHOLE}
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=cache.parent, delete=False) as file:
            json.dump(kept, file)
        os.replace(file.name, cache)
    except OSError as error:
        logger.debug("digests of source files are not cached: %s", error)
