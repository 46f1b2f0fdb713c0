"""What a tracker is, and what it gets of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Entry = dict[str, Any]


class Tracker(Protocol):
    """Something that takes entries; used by one thread alone, which may raise whatever it likes."""

    def write(self, entries: Sequence[Entry]) -> None:
        """Take some entries, none at all now and then."""
        ...

    def close(self) -> None:
        """Finish."""
        ...

    def abandon(self) -> None:
        """Called by another thread when `close` came to no end in time: let go of everything."""
        ...


@dataclass(frozen=True, kw_only=True)
class TrackerContext:
    """What trackers get of a run.

    Attributes:
        directory: URL for what they write, this attempt's own.
        run: name of the run, the same for all its attempts.
        attempt: name of this attempt.
        build: what tells this run's attempts from those of an earlier run of that name, which it
            replaces; empty where there is only one.
        config: the resolved configuration as JSON would hold it; never an environment.
    """

    directory: str
    run: str
    attempt: str
    config: Mapping[str, Any]
    build: str = ""
