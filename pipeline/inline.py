"""Workers in this process: for tests, tiny graphs, and inside a worker that is already placed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from pipeline.errors import InputError
from pipeline.hardware import Hardware
from pipeline.manifest import Shard
from pipeline.run import Emit, GangProcess, ShardTask, write_shard


class InlineWorkers:
    """Does everything itself, one thing after another."""

    def map(self, tasks: list[ShardTask]) -> Iterator[Shard]:
        """Write the shards in order."""
        for task in tasks:
            yield write_shard(task)

    def gang(self, hardware: Hardware, function: Callable[..., Any], job: Any, emit: Emit) -> Any:
        """Call the function here. Raises `InputError` for hardware that is not this process."""
        if hardware.kind != "local":
            raise InputError(
                f"hardware {hardware.name!r} needs {hardware.processes} processes of its own; "
                "the in-process executor has none: use --executor ray"
            )
        return function(job, process=GangProcess(), emit=emit)
