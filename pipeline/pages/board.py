"""The runs of a store for readers that ask again and again: what has not changed is not read again.

A refresh is one listing of the runs' summaries, and for each run in progress a look at what
its log has more. Nothing is written, so a login that may only read is enough.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from pipeline.errors import CorruptOutput
from pipeline.execute.run_record import RunRecord, StepRecord
from pipeline.pages import page
from pipeline.pages.record import Follower
from pipeline.store import run_summary, storage
from pipeline.store.manifest import Manifest, load
from pipeline.store.parallel import concurrently

T = TypeVar("T")
RUNS_PER_PAGE = 100
_FRESH_SECONDS, _FRESH_BUCKET_SECONDS = 1.0, 4.0
MOST_RUNS = 400
_MOST_MANIFESTS = 2000


class Recent(OrderedDict[Any, T]):
    """The `most` values that were used last."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def keep(self, key: Any, value: T) -> T:
        self[key] = value
        self.move_to_end(key)
        while len(self) > self._most:
            self.popitem(last=False)
        return value


class Board:
    """The runs of one store; for one thread at a time.

    `curves` says whether a step has curves, from its record and its output's manifest (or None):
    then its directory is a page. `links` (text, URL) are those of the index to other pages.
    """

    def __init__(
        self,
        prefix: str,
        curves: Callable[[StepRecord, Manifest | None], bool] = lambda _, __: False,
        links: Sequence[tuple[str, str]] = (),
    ) -> None:
        self.prefix, self._curves, self._links = prefix, curves, links
        self.lock = threading.RLock()
        self._fresh = _FRESH_SECONDS if storage.is_local(prefix) else _FRESH_BUCKET_SECONDS
        self._listed, self._listing = float("-inf"), 0
        self._written: dict[str, float] = {}
        self._seen: Recent[_Seen] = Recent(MOST_RUNS)
        self._manifests: Recent[Manifest | CorruptOutput | None] = Recent(_MOST_MANIFESTS)

    def ids(self) -> list[str]:
        """The names of all runs, newest first; listed again when the last listing is old."""
        now = time.monotonic()
        if now - self._listed >= self._fresh:
            found = storage.entries(storage.join(self.prefix, "events"))
            self._written = run_summary.written(found)
            self._listed, self._listing = now, self._listing + 1
        return sorted(self._written, reverse=True)

    def records(self, runs: list[str]) -> list[RunRecord]:
        """The records of runs of `ids`, as they are now."""

        def look(run: str) -> tuple[_Seen, RunRecord]:
            seen = self._seen.get(run) or _Seen(Follower(self.prefix, run))
            return seen, seen.look(self._written[run], self._listing)

        found = dict(zip(runs, concurrently(look, runs, self.prefix), strict=True))
        for run, (seen, _) in found.items():
            self._seen.keep(run, seen)
        return [record for _, record in found.values()]

    def index(self, number: int = 1) -> str:
        """The table of runs, `RUNS_PER_PAGE` on one page; the first has the newest."""
        ids = self.ids()
        begin = RUNS_PER_PAGE * (number - 1)
        links = [("← newer", f"index.html?page={number - 1}")] if number > 1 else []
        if begin + RUNS_PER_PAGE < len(ids):
            links.append(("older →", f"index.html?page={number + 1}"))
        found = self.records(ids[begin : begin + RUNS_PER_PAGE])
        return page.render_index(found, total=len(ids), links=[*links, *self._links])

    def run(self, run: str) -> str | None:
        """The page of a run; None for one that is not in the store."""
        ids = self.ids()
        if run not in ids:
            return None
        (record,), at = self.records([run]), ids.index(run)
        record.store = record.store or self.prefix
        manifests, curves = {}, set()
        for step, found in self._outputs(record):
            if isinstance(found, CorruptOutput) and str(found) not in step.warnings:
                step.warnings.append(str(found))
            if isinstance(found, Manifest) and found.key == step.key:
                manifests[step.key] = found
            if self._curves(step, manifests.get(step.key)):
                curves.add(step.key)
        # The page before and the one after: only their names are used.
        later, earlier = ids[max(at - 1, 0) : at], ids[at + 1 : at + 2]
        beside = [RunRecord(name, started=record.started + 1) for name in later]
        beside += [RunRecord(name, started=record.started - 1) for name in earlier]
        return page.render(record, manifests, beside, curves)

    def _outputs(
        self, record: RunRecord
    ) -> list[tuple[StepRecord, Manifest | CorruptOutput | None]]:
        """The steps with a directory, and the manifest in it."""
        # It changes only with the state of the step in this run, or with one of its attempts.
        states = {
            (step.directory, step.key, step.state, step.ended, len(step.attempts)): step
            for step in record.steps.values()
            if step.directory
        }
        new = [state for state in states if state not in self._manifests]
        read = concurrently(lambda state: _loaded(self.prefix, states[state]), new, self.prefix)
        found = {state: self._manifests.get(state) for state in states}
        found |= dict(zip(new, read, strict=True))
        return [(states[state], self._manifests.keep(state, each)) for state, each in found.items()]


def _loaded(prefix: str, step: StepRecord) -> Manifest | CorruptOutput | None:
    try:
        return load(storage.join(prefix, step.directory))
    except CorruptOutput as error:
        return error


class _Seen:
    """A run that was read, and the time of its summary and the listing when it was."""

    def __init__(self, follower: Follower) -> None:
        self._follower, self._at = follower, (-1.0, -1)
        self._record: RunRecord | None = None

    def look(self, written: float, listing: int) -> RunRecord:
        record = self._record
        over = record is not None and not record.alive and written == self._at[0]
        if record is None or (not over and listing != self._at[1]):
            age = max(0.0, time.time() - written) if written else None
            self._record = record = self._follower.look(age)
        self._at = written, listing
        return record
