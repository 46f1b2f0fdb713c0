"""Workers in this process: for tests, tiny graphs, and inside a worker that is already placed."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

from pipeline.errors import Cancelled, InputError
from pipeline.graph.hardware import Hardware
from pipeline.graph.step_context import Emit, GangProcess, ShardTask, write_shard
from pipeline.store.manifest import Shard


class InlineWorkers:
    """Does everything itself, one thing after another.

    Attributes:
        stopping: whether the user asked to stop.
    """

    def __init__(self) -> None:
        self.stopping = False
        self._ends: Callable[[], None] | None = None

    def stop(self) -> None:
        """End after what is in flight; called by a signal handler, in the middle of anything.

        Raises:
            KeyboardInterrupt: when a gang runs that does not listen to SIGTERM.
        """
        self.stopping = True
        if self._ends is not None:
            self._ends()

    def map(self, tasks: list[ShardTask], emit: Emit) -> Iterator[Shard]:
        """Write the shards in order."""
        del emit
        for number, task in enumerate(tasks):
            if self.stopping:
                raise Cancelled(f"{len(tasks) - number} shards are left to do")
            yield write_shard(task)

    def gang(
        self, hardware: Hardware, function: Callable[..., Any], job: Any, emit: Emit, logs: str = ""
    ) -> Any:
        """Call the function here. Raises `InputError` for hardware that is not this process."""
        del logs  # this process has one already
        if hardware.kind != "local":
            raise InputError(
                f"hardware {hardware.name!r} needs {hardware.processes} processes of its own; "
                "the in-process executor has none: use --executor ray"
            )
        before = signal.getsignal(signal.SIGTERM)

        def ends() -> None:
            if signal.getsignal(signal.SIGTERM) == before:
                raise KeyboardInterrupt
            signal.raise_signal(signal.SIGTERM)  # asks a training loop to save and leave

        self._ends = ends
        try:
            return function(job, process=GangProcess(), emit=emit)
        finally:
            self._ends = None
