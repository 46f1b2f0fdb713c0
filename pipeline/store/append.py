"""Files that grow while they are read: logs, events, metrics.

On a local disk such a file is written in place; on an object store it is a directory of parts
(`000001.txt`, ...), uploaded every `PART_SECONDS` or `PART_BYTES`. Of each `MERGED` parts one is
made, named after the first and the last (`000001-000064.txt`), and of each `MERGED` of those.
Readers ignore a part whose bytes a merged one has.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

from pipeline.errors import PonenteError
from pipeline.store import local_storage, storage
from pipeline.store.parallel import concurrently

PART_SECONDS = 10.0
PART_BYTES = 64 * 1024
MERGED = 64
_MERGED_BYTES = 4 * 2**20
_LOOKS = 5  # a reader lists the parts again if some were merged since it listed them
_PART = re.compile(r"(\d+)(?:-(\d+))?\.txt")

logger = logging.getLogger("ponente")


@dataclass(frozen=True)
class _Part:
    """An uploaded object: the numbers of the parts whose bytes it has, and where those are."""

    first: int
    last: int
    start: int
    end: int

    @property
    def name(self) -> str:
        last = f"-{self.last:06d}" if self.last > self.first else ""
        return f"{self.first:06d}{last}.txt"


class Appender:
    """The one writer of a growing file; a context that makes the file at its beginning.

    `path` is the local file, to which others may append as well; on an object store a temporary
    copy, which a thread uploads.
    """

    def __init__(self, url: str) -> None:
        self._url, self._rest = url, b""
        self._file: IO[bytes] | None = None
        self._uploaded: list[_Part] = []
        # The first part is uploaded at once: it says what has begun.
        self._sent, self._number, self._last = 0, 0, -PART_SECONDS
        self._uploading, self._over, self._failed = threading.Lock(), threading.Event(), False
        self._thread: threading.Thread | None = None
        if storage.is_local(url):
            self.path = storage.local_path(url)
            return
        descriptor, self.path = tempfile.mkstemp(suffix=".log")
        os.close(descriptor)
        self._thread = threading.Thread(target=self._follow, name="log-upload", daemon=True)
        self._thread.start()

    def __enter__(self) -> Appender:
        self.write(b"")
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, data: bytes) -> None:
        """Append; what an `OSError` left unwritten is written first by the next call."""
        self._rest += data
        try:
            file = self._open()
            while self._rest:
                self._rest = self._rest[file.write(self._rest) :]
        except OSError:
            self._close_file()  # to be opened again: its disk or its server may be another then
            raise

    def _open(self) -> IO[bytes]:
        if self._file is None:
            if self._thread is None:
                local_storage.make_directory(os.path.dirname(self.path))
            self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115
        return self._file

    def _close_file(self) -> None:
        file, self._file = self._file, None
        with contextlib.suppress(OSError):
            if file is not None:
                file.close()

    def flush(self) -> None:
        """Store what was written, durably; raises the error of a store or disk that failed."""
        self.write(b"")
        if self._thread is None:
            os.fsync(self._open().fileno())
        else:
            self._upload()

    def close(self) -> None:
        """Store what was written; errors are logged."""
        with contextlib.suppress(OSError):
            if self._rest:
                self.write(b"")
        self._close_file()
        if self._thread is not None:
            self._over.set()
            self._thread.join()
            os.unlink(self.path)

    def _follow(self) -> None:
        while not self._over.wait(1.0):
            grown = os.path.getsize(self.path) - self._sent
            overdue = time.monotonic() - self._last >= PART_SECONDS
            if grown >= PART_BYTES or (grown and overdue):
                self._try()
        self._try()

    def _try(self) -> None:
        try:
            self._upload()
        except (OSError, PonenteError) as error:
            # An upload that fails must not fail the step; the next part includes these bytes too.
            if not self._failed:
                logger.warning("%s: cannot be uploaded: %s", self._url, error)
            self._failed = True

    def _upload(self) -> None:
        with self._uploading:
            self._last, number = time.monotonic(), self._number + 1
            part = _Part(number, number, self._sent, os.path.getsize(self.path))
            if part.end > part.start:
                self._write_part(part)
                self._number, self._sent = part.last, part.end
                self._merge()

    def _write_part(self, part: _Part) -> None:
        with open(self.path, "rb") as file:
            file.seek(part.start)
            text = file.read(part.end - part.start)
        storage.write_atomic(storage.join(self._url, part.name), text)
        self._uploaded.append(part)

    def _merge(self) -> None:
        """Replace the last `MERGED` objects of as many parts each by one."""
        while len(last := self._uploaded[-MERGED:]) == MERGED:
            whole = _Part(last[0].first, last[-1].last, last[0].start, last[-1].end)
            if len({p.last - p.first for p in last}) > 1 or whole.end - whole.start > _MERGED_BYTES:
                return
            self._write_part(whole)
            self._uploaded[-MERGED - 1 :] = [whole]
            fs, directory = storage.filesystem(self._url)
            with contextlib.suppress(OSError):  # readers ignore those that stay
                fs.rm([f"{directory}/{part.name}" for part in last])


class Tail:
    """Reads a growing file from its beginning, or from byte `read`, then what was appended."""

    def __init__(self, url: str, read: int = 0) -> None:
        self._url, self.read = url, read

    def more(self) -> bytes:
        """The bytes appended since the last call; empty when there are none."""
        if not storage.is_local(self._url):
            return b"".join(self._uploaded())
        try:
            with storage.open_read(self._url) as file:
                file.seek(self.read)
                text = file.read()
        except FileNotFoundError:
            return b""
        self.read += len(text)
        return text

    def _uploaded(self) -> Iterator[bytes]:
        for _ in range(_LOOKS):
            wanted, start = [], 0
            for name, size in _parts(self._url):
                if start + size > self.read:
                    wanted.append((storage.join(self._url, name), max(self.read - start, 0)))
                start += size
            texts = concurrently(_part, (url for url, _ in wanted), self._url)
            for text, (_, skipped) in zip(texts, wanted, strict=True):
                if text is None:
                    break  # merged since it was listed
                self.read += len(text) - skipped
                yield text[skipped:]
            else:
                return


def objects(url: str) -> list[tuple[str, int]]:
    """URL and size of the files that a growing file consists of, in order; none if it is absent."""
    if not storage.is_local(url) and (parts := _parts(url)):
        return [(storage.join(url, name), size) for name, size in parts]
    size = storage.size(url)
    return [] if size is None else [(url, size)]


def _parts(url: str) -> list[tuple[str, int]]:
    """Names and sizes of the objects that a file consists of, in order."""
    found = []
    for name, size in storage.list_files(url):
        if match := _PART.fullmatch(name):
            found.append((int(match[1]), -int(match[2] or match[1]), name, size))
    kept, reached = [], 0
    for _, last, name, size in sorted(found):
        if -last > reached:
            kept.append((name, size))
            reached = -last
    return kept


def _part(url: str) -> bytes | None:
    try:
        return storage.read_bytes(url)
    except FileNotFoundError:
        return None
