"""A directory that other libraries write files to, mirrored to an object store.

With a local URL the files are written in place. Elsewhere files grow in a temporary directory and
are uploaded whole every 30 seconds, if their size changed; a kill loses what was not yet uploaded.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from pipeline.store import storage

logger = logging.getLogger(__name__)

UPLOAD_SECONDS = 30.0


class Spool:
    """A directory to write to, `path`, and its copy at a URL."""

    def __init__(self, url: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._url, self._clock = url, clock
        self._remote = not storage.is_local(url)
        self._sizes: dict[Path, int] = {}
        self._next = clock() + UPLOAD_SECONDS
        self.path = Path(
            tempfile.mkdtemp(prefix="ponente-") if self._remote else storage.local_path(url)
        )
        self.path.mkdir(parents=True, exist_ok=True)

    def sync(self) -> None:
        """Upload what grew, at most every 30 seconds; errors of the store are logged."""
        if not self._remote or self._clock() < self._next:
            return
        try:
            self._upload()
        except OSError as error:
            logger.warning("%s: not uploaded, will be retried: %s", self._url, error)
        self._next = self._clock() + UPLOAD_SECONDS

    def close(self) -> None:
        """Upload the rest and delete the temporary copy, which an `OSError` leaves."""
        if self._remote:
            self._upload()
            shutil.rmtree(self.path, ignore_errors=True)

    def _upload(self) -> None:
        for path in sorted(self.path.rglob("*")):
            if path.is_file() and self._sizes.get(path) != path.stat().st_size:
                data = path.read_bytes()
                name = path.relative_to(self.path).as_posix()
                storage.write_atomic(storage.join(self._url, name), data)
                self._sizes[path] = len(data)
