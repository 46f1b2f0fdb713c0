"""From the start of a gang to the end of its first step, by part.

    starting     a process of the gang is started, on hardware that is there
    importing    the trainer and its libraries
    joining      the processes meet and find their devices
    restoring    the state is read or made, while the step is compiled or loaded
    compiling    what was left of compiling or loading it then
    evaluation   scoring before the first step, of new parameters
    first batch  until the loader has it
    first step   until its numbers are read

Each part begins where the one before ended, so they add up to the whole; those that did not come to
pass have none.
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
    """Times the parts; one thread ends them, any may read.

    Args:
        before: seconds of parts that ended before this was made.
        clock: seconds of a clock that never goes back.
    """

    def __init__(
        self,
        before: Mapping[str, float] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._clock = clock
        self._since = clock()
        # Replaced and never changed: the journal's thread reads it at any moment.
        self._seconds = dict(before or {})

    def ended(self, part: str) -> None:
        """The part ends now, and the next one begins; what ended before is left as it was."""
        if part in self._seconds or PARTS[-1] in self._seconds:
            return
        now = self._clock()
        self._seconds = {**self._seconds, part: now - self._since}
        self._since = now

    def seconds(self) -> dict[str, float]:
        """Seconds by part, of those that ended."""
        return self._seconds
