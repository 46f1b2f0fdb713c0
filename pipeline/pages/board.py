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
from pipeline.store.manifest import Manifest
from pipeline.store.parallel import by_item

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
        # A run's reader and record, and the time of its summary and the listing when it was read.
        self._seen: Recent[tuple[Follower, RunRecord, float, int]] = Recent(MOST_RUNS)
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

        def look(run: str) -> tuple[Follower, RunRecord, float, int]:
            written = self._written[run]
            if run in self._seen:
                follower, record, at, listing = self._seen[run]
                if listing == self._listing or (not record.alive and written == at):
                    return follower, record, written, self._listing
            else:
                follower = Follower(self.prefix, run)
            record = follower.look(max(0.0, time.time() - written) if written else None)
            return follower, record, written, self._listing

        found = by_item(look, runs, self.prefix)
        return [self._seen.keep(run, seen)[1] for run, seen in found.items()]

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
        manifests = page.own_manifests(self._outputs(record))
        steps = record.steps.values()
        curves = {step.key for step in steps if self._curves(step, manifests.get(step.key))}
        earlier, later = "".join(ids[at + 1 : at + 2]), "".join(ids[max(at - 1, 0) : at])
        return page.render(record, manifests, earlier, later, curves)

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
        known = {state: self._manifests[state] for state in states if state in self._manifests}
        new = [state for state in states if state not in known]
        known |= by_item(lambda state: page.output(self.prefix, states[state]), new, self.prefix)
        return [(step, self._manifests.keep(state, known[state])) for state, step in states.items()]
