"""Files of other libraries that grow on this machine and are kept in an object store.

A local directory is written to as it is. An object store has no append, so there a file grows in a
temporary directory and is uploaded whole: every half minute at first, and never for more than a
twentieth of the time. Where the store fails the next upload has what this one lacked; at the end
it is asked a few times. A kill loses what was not uploaded.
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
UPLOAD_SHARE = 0.05
CLOSING_TRIES = 3
CLOSING_WAIT_SECONDS = 1.0


class Spool:
    """A directory to write to, and its copy at a URL.

    Args:
        url: where the files belong; written to directly when it is on this machine's disks.
        clock: seconds.
        pause: waits so many seconds between tries at the end.

    Attributes:
        path: the directory to write to.
    """

    def __init__(
        self,
        url: str,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._url = url
        self._clock = clock
        self._pause = pause
        self._remote = not storage.is_local(url)
        self._sizes: dict[Path, int] = {}
        self._next = clock() + UPLOAD_SECONDS
        if self._remote:
            self.path = Path(tempfile.mkdtemp(prefix="ponente-"))
        else:
            self.path = Path(storage.local_path(url))
            self.path.mkdir(parents=True, exist_ok=True)

    def sync(self) -> None:
        """Upload files that have grown, when it is time to; a local one needs nothing.

        A store that fails is asked again at the next time.
        """
        if not self._remote or self._clock() < self._next:
            return
        began, spared = self._clock(), 0.0
        try:
            self._upload()
            spared = (self._clock() - began) / UPLOAD_SHARE
        except OSError as error:
            # Only time that brought something over counts against the share: waiting for a store
            # that does not answer would put off the next try for half an hour.
            logger.warning("%s: not uploaded, tried again later: %s", self._url, error)
        self._next = self._clock() + max(UPLOAD_SECONDS, spared)

    def close(self) -> None:
        """Upload what is left and delete the temporary copy.

        Raises:
            OSError: the store failed every time; the temporary copy is left.
        """
        if not self._remote:
            return
        for left in reversed(range(CLOSING_TRIES)):
            try:
                self._upload()
                break
            except OSError:
                if not left:
                    logger.warning("%s: what was not uploaded is in %s", self._url, self.path)
                    raise
                self._pause(CLOSING_WAIT_SECONDS)
        shutil.rmtree(self.path, ignore_errors=True)

    def _upload(self) -> None:
        for path in sorted(self.path.rglob("*")):
            if path.is_file() and self._sizes.get(path) != path.stat().st_size:
                data = path.read_bytes()
                name = path.relative_to(self.path).as_posix()
                storage.write_atomic(storage.join(self._url, name), data)
                self._sizes[path] = len(data)
