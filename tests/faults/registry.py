"""Which fault suites there are, and how one is run: by number, seed and count.

A suite is `run(seed, count, workspace) -> figures`. It makes `count` trials; trial i is decided by
the number `seed + i` alone, so the number of a failing trial, given as the seed, makes it the
first trial of a new run. A violation is an `AssertionError` that names that number.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MODULES = (
    "absurd_models",
    "absurd_sources",
    "crash",
    "records",
    "damaged_manifests",
    "remote",
    "driver_outage",
    "leases",
    "owners",
    "readers",
    "interrupts",
    "slow_save",
    "network",
    "screen",
    "cache_damage",
    "cache_full",
    "checkpoint_damage",
    "checkpoint_full",
    "checkpoint_kill",
    "checkpoint_mismatch",
    "code_changes",
    "hostile_tokenizers",
    "hub",
    "preparation",
    "source_changes",
    "source_files",
    "tokenizers",
    "training",
)
_SHOWN = 8


@dataclass(frozen=True)
class Fault:
    """One suite of faults of one kind."""

    title: str  # what is done to the system, in a few words
    ci: int  # trials on every commit, 0 for none
    full: int  # trials before a release
    # (seed, count, empty directory) -> figures; raises AssertionError on a violation.
    run: Callable[[int, int, Path], dict[str, Any]]
    slow: bool = True  # the trials of `ci` take more than about two seconds


class Violation(AssertionError):
    """What a system under a fault did and must not do; `seed` replays it."""

    def __init__(self, seed: int, message: str) -> None:
        super().__init__(seed, message)  # of which a copy is made in another process
        self.seed, self._message = seed, message

    def __str__(self) -> str:
        return self._message


def gather() -> dict[int, list[Fault]]:
    """Every registered fault by its number, from the modules that are there."""
    found: dict[int, list[Fault]] = {}
    for name in _MODULES:
        if importlib.util.find_spec(f"tests.faults.{name}") is not None:
            module = importlib.import_module(f"tests.faults.{name}")
            for number, faults in module.FAULTS.items():
                found.setdefault(number, []).extend(faults)
    return dict(sorted(found.items()))


def carry_out(
    number: int | str, fault: Fault, seed: int, count: int, workspace: Path
) -> dict[str, Any]:
    """Run one suite; returns its row: what was run, whether it passed, its figures or error."""
    row: dict[str, Any] = {"number": number, "title": fault.title, "seed": seed, "count": count}
    clock = time.monotonic()
    try:
        row |= {"passed": True, "figures": fault.run(seed, count, workspace)}
    except AssertionError as error:
        row |= {"passed": False, "error": str(error)}
        if isinstance(error, Violation):
            row["replay"] = f"--only {number} --seed {error.seed}"
    return {**row, "seconds": round(time.monotonic() - clock, 1)}


def trials(seed: int, count: int, trial: Callable[[int], None]) -> int:
    """Make the trials from `seed` on, all of them; `Violation` if one raised anything."""
    wrong: list[tuple[int, str]] = []
    for number in range(seed, seed + count):
        try:
            trial(number)
        except Exception as error:  # noqa: BLE001 - whatever a trial lets out is a violation
            wrong.append((number, f"{type(error).__name__}: {error}"))
    if wrong:
        lines = [f"seed {number}: {reason}" for number, reason in wrong[:_SHOWN]]
        more = f"\n... and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        head = f"{len(wrong)} of {count} trials violated what must hold\n"
        raise Violation(wrong[0][0], head + "\n".join(lines) + more)
    return count


def pick(number: int, of: int) -> int:
    """Which of `of` cases trial `number` is: any `of` numbers in a row give each case once."""
    return _shuffled(of)[number % of]


@functools.cache
def _shuffled(of: int) -> list[int]:
    # So that few trials are spread over all cases, whatever the order of the cases is.
    return random.Random(0).sample(range(of), of)
