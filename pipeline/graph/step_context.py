"""The context of a step's body: where to write, which shards are finished, reporting progress.

The output is the explicit set of shards that `shard`, `map` and `finished` returned and `declare`
named in this attempt, whether this attempt wrote them or found them finished. A shard that other
code of the step wrote is not finished: it is built again, with a warning. Only `claim` takes it
over, for state from which a step continues, such as checkpoints.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from pipeline import events
from pipeline.errors import InputError, WorkerLost
from pipeline.events import Emit
from pipeline.graph.artifact import Artifact
from pipeline.graph.hardware import Hardware
from pipeline.store import local_storage, storage
from pipeline.store.builds import OtherCode, other_code
from pipeline.store.ledger import Ledger
from pipeline.store.manifest import KEEP, PROCESS_LOGS
from pipeline.store.parallel import by_item
from pipeline.store.shards import ATTEMPTS, Shard

ShardWriter = Callable[[str, Any], Mapping[str, Any]]

logger = logging.getLogger("ponente")


@dataclass(frozen=True)
class ShardTask:
    """One shard to write: picklable, executed by `write_shard` in any process.

    Each try, by `number`, writes to a directory of its own, as a writer that was given up may still
    be writing.
    """

    ledger: Ledger
    attempt: str
    name: str
    writer: ShardWriter
    item: Any
    number: int = 1


def write_shard(task: ShardTask) -> Shard:
    """Write one shard under the attempt and record it; returns the shard that the ledger has.

    Reads the record first, since the listing that led to this task may have been out of date.
    """
    finished = task.ledger.look(task.name)
    if finished is not None and task.ledger.reuses(finished):
        return finished.shard
    part = "shards" if task.number == 1 else f"shards-{task.number}"
    directory = storage.join(task.ledger.root, ATTEMPTS, task.attempt, part, task.name)
    _make(directory)
    return task.ledger.add(task.name, directory, task.writer(directory, task.item))


def _make(directory: str) -> None:
    """Make an empty directory on a disk; a bucket has none, and each try has a name of its own."""
    if storage.is_local(directory):
        storage.delete_tree(directory)
        local_storage.make_directory(storage.local_path(directory))


@dataclass(frozen=True)
class Reference:
    """A body returns this when its output is that of one of its inputs: nothing is copied.

    `kind` says why, such as "selected"; `result` is that of the output.
    """

    artifact: Artifact
    kind: str
    result: Mapping[str, Any]


class Workers(Protocol):
    """What runs a step body's shards and gangs: implemented in this process, and on Ray."""

    @property
    def stopping(self) -> bool: ...

    def map(self, tasks: list[ShardTask], emit: Emit) -> Iterator[Shard]:
        """Write the shards, several at once where there are cores; yields as they finish."""
        ...

    def gang(
        self, hardware: Hardware, function: Callable[..., Any], job: Any, emit: Emit, logs: str
    ) -> Any:
        """Run `function(job, process=..., emit=...)` on every process of the hardware at once.

        `logs` is the URL of the directory for the logs of other processes than this one.
        """
        ...


@dataclass(frozen=True)
class GangProcess:
    """Which process of a gang this is."""

    index: int = 0
    count: int = 1
    coordinator: str | None = None  # "host:port" that process 0 listens on; None in a gang of one
    # Unix time at which the engine began to start the gang, after its hardware was reserved; by the
    # clock of the engine's machine.
    started: float = field(default_factory=time.time)


class StepContext:
    """One attempt at one step, as its body sees it; `root` is shared by all attempts."""

    def __init__(
        self, ledger: Ledger, label: str, attempt: str, emit: Emit, workers: Workers
    ) -> None:
        self.root = ledger.root
        self.label = label
        self.attempt = attempt
        self.ledger = ledger
        self._emit = emit
        self._workers = workers
        self._written: set[str] = set()
        self._finished: dict[str, Shard] = {}  # records of the ledger that were read
        self._declared: dict[str, Shard] = {}
        self._warned: set[str] = set()
        self._kept = self._continued = OtherCode()

    @property
    def directory(self) -> str:
        """URL of this attempt's directory: the only place this attempt writes data."""
        return storage.join(self.root, ATTEMPTS, self.attempt)

    @property
    def keep(self) -> str:
        """URL of a directory for files to inspect: kept for every attempt, failed or not."""
        return storage.join(self.directory, KEEP)

    @property
    def stopping(self) -> bool:
        """Whether to end now: the user cancelled the run, or a live input was lost."""
        return self._workers.stopping

    @property
    def declared(self) -> dict[str, Shard]:
        return dict(sorted(self._declared.items()))

    def progress(self, done: float, total: float, unit: str, note: str = "") -> None:
        self._emit(events.Progress(done, total, unit, note))

    def warn(self, message: str) -> None:
        logger.warning(message)
        self._emit(events.Warned(message))

    def finished(self, prefix: str = "") -> dict[str, Shard]:
        """Shards finished by this attempt or an earlier one; they become part of the output."""
        known = self._known(lambda name: name.startswith(prefix))
        found = {name: known[name] for name in sorted(known) if name.startswith(prefix)}
        self._declared |= found
        return found

    def _known(self, wanted: Callable[[str], bool], of: int | None = None) -> dict[str, Shard]:
        """The shards to reuse; lists the ledger again, as a gang adds to it, and reads each once.

        Warns of shards that other code wrote among the `wanted` ones, which will be `of` in all.
        """
        there = self.ledger.shard_names()
        new = there - self._finished.keys() - self._declared.keys()
        records = self.ledger.records(new, copy=True)
        reused = {name: r.shard for name, r in records.items() if self.ledger.reuses(r)}
        self._finished |= reused
        other = other_code(self.ledger, {n: r for n, r in records.items() if wanted(n)})
        total = len(list(filter(wanted, there))) if of is None else of
        for line in itertools.chain(*other.lines(total, keep=self.ledger.keep)):
            self._warn_once(line)
        if self.ledger.keep:
            self._kept = self._kept.with_(other)
        return self._finished | self._declared

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            self.warn(message)

    def other_code(self) -> dict[str, Any]:
        found = {}
        for how, other in (("kept", self._kept), ("continued", self._continued)):
            if shards := self._declared.keys() & set(other.shards):
                count, of = len(shards), len(self._declared)
                found[how] = {"shards": count, "of": of, "files": other.files}
        return {"other_code": found} if found else {}

    def claim(self, prefix: str) -> dict[str, Shard]:
        """Take over shards of earlier attempts, which only this attempt may drop from now on.

        They are part of the output once declared. `WorkerLost` when a newer attempt owns one of
        them.
        """
        names = [name for name in sorted(self.ledger.shard_names()) if name.startswith(prefix)]
        other = other_code(self.ledger, self.ledger.records(names) if self.ledger.code else {})
        if other.shards:
            self._continued = self._continued.with_(other)
            self._warn_once(other.continued)
        found = by_item(lambda name: self.ledger.claim(name, self.attempt), names, self.root)
        return {name: shard for name, shard in found.items() if shard is not None}

    def declare(self, name: str) -> None:
        """Make a shard that a gang's process wrote, or that was claimed, part of the output."""
        shard = self.ledger.claim(name, self.attempt)
        if shard is None:
            raise WorkerLost(f"{self.root}: shard {name!r} was deleted by another process")
        self._declared[name] = shard

    def drop(self, name: str) -> None:
        self.ledger.drop(name, self.attempt)
        self._declared.pop(name, None)
        self._finished.pop(name, None)

    @contextlib.contextmanager
    def shard(self, name: str, result: dict[str, Any] | None = None) -> Iterator[str]:
        """A directory to fill; on leaving without an error it is recorded as shard `name`.

        `result` may be filled inside the block. Where `map` did not give the number of shards,
        `plan` shows the "progress" in the last shard's result, such as "step 40 of 100".
        """
        self.ledger.record(name)  # refuses a bad name before anything is written
        if name in self._written:
            raise InputError(f"shard {name!r} is written twice by one attempt; name them apart")
        self._written.add(name)
        directory = storage.join(self.directory, "shards", name)
        _make(directory)
        yield directory
        # What was just written replaces a shard of other code, also with --keep-shards.
        ledger = dataclasses.replace(self.ledger, keep=False)
        self._declared[name] = ledger.add(name, directory, result or {})

    def map(self, writer: ShardWriter, items: Mapping[str, Any]) -> dict[str, Shard]:
        """Write one shard per item with `writer(directory, item) -> result`, across workers.

        Shards that this code finished already are not written again. Returns all, sorted by name.
        """
        known = self._known(items.__contains__, len(items))
        shards = {name: known[name] for name in known if name in items}
        tasks = [
            ShardTask(self.ledger, self.attempt, name, writer, item)
            for name, item in items.items()
            if name not in shards
        ]
        if shards:
            logger.info("%d of %d shards were finished before", len(shards), len(items))
            self._declared |= shards
        self.ledger.expect(items)
        self.progress(len(shards), len(items), "shards")
        for shard in self._workers.map(tasks, self._emit):
            shards[shard.name] = self._declared[shard.name] = shard
            self._emit(events.ShardFinished(shard.name, shard.bytes))
            self.progress(len(shards), len(items), "shards")
        return dict(sorted(shards.items()))

    def gang(self, hardware: Hardware, function: Callable[..., Any], job: Any) -> Any:
        """Run `function(job, process=GangProcess, emit=...)` on the hardware; process 0's result.

        All processes start or none does, and the loss of one ends them all (`WorkerLost`).
        """
        logs = storage.join(self.directory, PROCESS_LOGS)
        return self._workers.gang(hardware, function, job, self._emit, logs)
