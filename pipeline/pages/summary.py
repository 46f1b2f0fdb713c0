"""Keeps the summary of a run while its driver lives, which says by it that it does."""

from __future__ import annotations

import logging
import threading
from typing import Any

from pipeline.errors import PonenteError
from pipeline.pages.record import Follower
from pipeline.store.run_summary import BEAT_SECONDS

logger = logging.getLogger("ponente")


class Summary:
    """Writes the summary of this process's run every `BEAT_SECONDS`, from another thread.

    A store that fails later costs the summary, never the run. `started` is the run's first event,
    `own_log` the local file of its event log.
    """

    def __init__(self, prefix: str, run_id: str, started: dict[str, Any], own_log: str) -> None:
        self._follower = Follower(prefix, run_id, own_log=own_log)
        self._started = started
        self._over, self._failed = threading.Event(), False
        self._thread = threading.Thread(target=self._beat, name="run-summary", daemon=True)

    def begin(self) -> None:
        """Write the first summary, without which the run has no protection; raises its error."""
        self._follower.begin(self._started)
        self._follower.save()
        self._thread.start()

    def _beat(self) -> None:
        while not self._over.wait(BEAT_SECONDS):
            self._save()

    def _save(self) -> None:
        try:
            self._follower.save()
            self._failed = False
        except (OSError, PonenteError) as error:
            if not self._failed:
                logger.warning("the summary of the run cannot be written: %s", error)
            self._failed = True

    def close(self) -> None:
        """Write the summary of the whole log, if one was begun; call it before that is closed."""
        if self._thread.ident is None:
            return
        self._over.set()
        self._thread.join()
        self._save()
