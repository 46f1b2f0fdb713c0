"""Clocks of a training process, and the line it prints."""

from __future__ import annotations

import json
import os
import statistics
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

WARM_UP = 10
"""Steps that do not count towards the steady rate."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What both systems train: one small Llama on random tokens, in float32.

    Attributes:
        born: `time.monotonic()` of the parent just before it started the process.
        work: directory for what a system writes.
    """

    born: float
    work: str
    vocab: int
    steps: int
    layers: int = 4
    embed: int = 128
    heads: int = 4
    mlp: int = 512
    position: int = 256
    batch: int = 8
    learning_rate: float = 3e-4
    remat: str = ""

    @property
    def tokens(self) -> int:
        """Positions in a step."""
        return self.position * self.batch


@dataclass
class Clock:
    """Wall and processor time of a process, from its start on.

    Args:
        options: of the run.
    """

    options: Options
    imported: float = 0.0
    ends: list[float] = field(default_factory=list)
    worked: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def now(self) -> float:
        """Seconds since the process was started."""
        return time.monotonic() - self.options.born

    def step(self, loss: float) -> None:
        """A step has finished: its loss has been read."""
        self.ends.append(self.now())
        self.worked.append(time.process_time())
        self.losses.append(loss)

    def record(self, name: str, *distributions: str, **more: Any) -> dict[str, Any]:
        """The line of this run; to be made when the last step has finished."""
        walls = [after - before for before, after in zip(self.ends, self.ends[1:], strict=False)]
        walls = walls[WARM_UP - 1 :]
        counted = len(walls)
        worked = (self.worked[-1] - self.worked[-1 - counted]) / counted
        tokens = self.options.tokens
        return {
            "name": name,
            "vocab": self.options.vocab,
            "import_s": round(self.imported, 2),
            "first_step_s": round(self.ends[0], 2),
            "first_step_cpu_s": round(self.worked[0], 2),
            "tokens_per_second": round(tokens / statistics.median(walls)),
            "best_tokens_per_second": round(tokens / min(walls)),
            "tokens_per_cpu_second": round(tokens / worked),
            "peak_rss_mib": peak_rss_mib(),
            "first_loss": round(self.losses[0], 4),
            "last_loss": round(self.losses[-1], 4),
            "steps": len(self.ends),
            "load": round(os.getloadavg()[0], 1),
            "versions": {each: version(each) for each in distributions},
            **more,
        }


def peak_rss_mib() -> float:
    """Most memory that this process has had, in MiB; nothing of the process that started it."""
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith("VmHWM"))
    return round(int(line.split()[1]) / 1024, 1)


def options_of(text: str) -> Options:
    """Read back what the parent wrote with `json.dumps(dataclasses.asdict(options))`."""
    return Options(**json.loads(text))


def emit(record: dict[str, Any]) -> None:
    """One JSON line on stdout."""
    print(json.dumps(record), flush=True)
