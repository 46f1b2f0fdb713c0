"""What a step's body is given: where to write, what is already finished, whom to tell.

The body writes only under its own attempt, and through shards: a directory that becomes part of
the output when its ledger record is created. What a dead attempt finished is there in
`finished()`; the body asks, and does the rest.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from pipeline import storage
from pipeline.hardware import Hardware
from pipeline.ledger import Ledger
from pipeline.manifest import Shard

Emit = Callable[[dict[str, Any]], None]
ShardWriter = Callable[[str, Any], Mapping[str, Any]]

logger = logging.getLogger("ponente")


@dataclass(frozen=True)
class ShardTask:
    """One shard to write: picklable, executed by `write_shard` in whatever process."""

    root: str
    attempt: str
    name: str
    writer: ShardWriter
    item: Any


def write_shard(task: ShardTask) -> Shard:
    """Write one shard under the attempt and record it; returns the record that stands."""
    directory = storage.join(task.root, "attempts", task.attempt, "shards", task.name)
    storage.delete_tree(directory)
    result = task.writer(directory, task.item)
    return Ledger(task.root).add(task.name, directory, result)


class Workers(Protocol):
    """How a step's body gets help: implemented in this process, and on Ray."""

    def map(self, tasks: list[ShardTask]) -> Iterator[Shard]:
        """Write the shards, several at once where there are cores; yields as they finish."""
        ...

    def gang(self, hardware: Hardware, function: Callable[..., Any], job: Any, emit: Emit) -> Any:
        """Run `function(job, process=..., emit=...)` on every process of the hardware at once."""
        ...


@dataclass(frozen=True)
class GangProcess:
    """Which process of a gang this is.

    Attributes:
        index, count: rank and size of the gang.
        coordinator: "host:port" that process 0 listens on; None in a gang of one.
    """

    index: int = 0
    count: int = 1
    coordinator: str | None = None


class StepRun:
    """One attempt at one step, seen from the step's body.

    Attributes:
        root: URL of the step's directory, shared by all attempts.
        attempt: name of this attempt.
    """

    def __init__(self, root: str, label: str, attempt: str, emit: Emit, workers: Workers) -> None:
        self.root = root
        self.label = label
        self.attempt = attempt
        self.ledger = Ledger(root)
        self._emit = emit
        self._workers = workers

    @property
    def directory(self) -> str:
        """URL of this attempt's directory: the only place this attempt writes data."""
        return storage.join(self.root, "attempts", self.attempt)

    def progress(self, done: float, total: float, unit: str, note: str = "") -> None:
        """Tell whoever watches that `done` of `total` units are behind us."""
        self._emit({"event": "progress", "done": done, "total": total, "unit": unit, "note": note})

    def warn(self, message: str) -> None:
        """Say something the user should see even if all goes well."""
        logger.warning(message)
        self._emit({"event": "warning", "message": message})

    def finished(self, prefix: str = "") -> dict[str, Shard]:
        """Shards finished by this attempt or an earlier one."""
        return self.ledger.finished(prefix)

    @contextlib.contextmanager
    def shard(self, name: str, result: dict[str, Any] | None = None) -> Iterator[str]:
        """A directory to fill; on leaving without an error it is recorded as shard `name`.

        `result` may be filled inside the block.
        """
        directory = storage.join(self.directory, "shards", name)
        storage.delete_tree(directory)
        yield directory
        self.ledger.add(name, directory, result or {})

    def map(self, writer: ShardWriter, items: Mapping[str, Any]) -> dict[str, Shard]:
        """Write one shard per item with `writer(directory, item) -> result`, across workers.

        Shards that are in the ledger already are not written again. Returns all of them, in
        order of name.
        """
        shards = {name: s for name, s in self.finished().items() if name in items}
        tasks = [
            ShardTask(self.root, self.attempt, name, writer, item)
            for name, item in items.items()
            if name not in shards
        ]
        if shards:
            logger.info("%d of %d shards were finished before", len(shards), len(items))
        self.progress(len(shards), len(items), "shards")
        for shard in self._workers.map(tasks):
            shards[shard.name] = shard
            self._emit({"event": "shard", "shard": shard.name, "bytes": shard.bytes})
            self.progress(len(shards), len(items), "shards")
        return dict(sorted(shards.items()))

    def gang(self, hardware: Hardware, function: Callable[..., Any], job: Any) -> Any:
        """Run `function(job, process=GangProcess, emit=...)` on the hardware; process 0's answer.

        All processes start or none, and the loss of one ends them all (`WorkerLost`).
        """
        return self._workers.gang(hardware, function, job, self._emit)
