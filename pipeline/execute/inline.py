"""Workers in this process: for tests, small graphs, and in a Ray worker that has its resources."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from pipeline.errors import Cancelled, InputError
from pipeline.events import Emit
from pipeline.graph.hardware import Hardware
from pipeline.graph.step_context import GangProcess, ShardTask, write_shard
from pipeline.store.shards import Shard


class InlineWorkers:
    """Writes shards one after another and runs a gang of one, in this process.

    Attributes:
        stopping: whether the user asked to stop.
    """

    def __init__(self) -> None:
        self.stopping = False
        self._ends: Callable[[], None] | None = None

    def stop(self) -> None:
        """Cancel after the shard in flight; called by a signal handler, at any point of the code,
        or by another thread.

        Raises:
            KeyboardInterrupt: when a gang runs that has no handler for SIGTERM.
        """
        self.stopping = True
        if self._ends is not None:
            self._ends()

    def map(self, tasks: list[ShardTask], emit: Emit) -> Iterator[Shard]:
        """Write the shards in order."""
        del emit
        for number, task in enumerate(tasks):
            if self.stopping:
                raise Cancelled(f"{len(tasks) - number} shards are not finished")
            yield write_shard(task)

    def gang(
        self, hardware: Hardware, function: Callable[..., Any], job: Any, emit: Emit, logs: str = ""
    ) -> Any:
        """Call the function. Raises `InputError` for hardware other than this process."""
        del logs  # this process already has a log
        if hardware.kind != "local":
            raise InputError(
                f"hardware {hardware.name!r} needs {hardware.processes} processes of its own; "
                "the in-process executor has none: use --executor ray"
            )
        before = signal.getsignal(signal.SIGTERM)

        def ends() -> None:
            deaf, main = signal.getsignal(signal.SIGTERM) == before, threading.main_thread()
            if deaf and threading.current_thread() is main:
                raise KeyboardInterrupt
            # To a training loop, which saves a checkpoint and ends; or here again, in that thread.
            assert main.ident is not None
            signal.pthread_kill(main.ident, signal.SIGINT if deaf else signal.SIGTERM)

        self._ends = ends
        try:
            return function(job, process=GangProcess(), emit=emit)
        finally:
            self._ends = None
