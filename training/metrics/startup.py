"""Times the parts of a gang's startup, from its start to the end of its first step.

    starting     start of the gang's processes, on hardware that is ready
    importing    import of the trainer and its libraries
    joining      the processes connect and find their devices
    restoring    restore or initialisation of the state, while the step is compiled or loaded
    compiling    the rest of that compilation or load
    evaluation   scoring of new parameters before the first step
    first batch  wait for the loader's first batch
    first step   until its metrics are read

Each part begins where the one before ended, so they add up to the whole. A part that did not happen
has no entry.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

PARTS = (
    "starting",
    "importing",
    "joining",
    "restoring",
    "compiling",
    "evaluation",
    "first batch",
    "first step",
)


class Startup:
    """Times the parts; one thread ends them, any thread may read.

    Args:
        before: seconds of parts that ended before this object was created.
        clock: returns the seconds of a monotonic clock.
    """

    def __init__(
        self,
        before: Mapping[str, float] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._clock = clock
        self._since = clock()
        # Replaced as a whole and never modified: the journal's thread may read it at any time.
        self._seconds = dict(before or {})

    def ended(self, part: str) -> None:
        """End `part` now and begin the next one; no effect when `part` or the last part ended."""
        if part in self._seconds or PARTS[-1] in self._seconds:
            return
        now = self._clock()
        self._seconds = {**self._seconds, part: now - self._since}
        self._since = now

    def seconds(self) -> dict[str, float]:
        """Seconds of each part that has ended."""
        return self._seconds
