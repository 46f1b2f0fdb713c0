"""What can lie in `leases/` when an executor comes by: torn, stale, foreign or impossible."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults.lease_trial import owner_here, write_lease


@dataclass(frozen=True)
class Remains:
    """What a trial finds in `leases/`.

    Attributes:
        write: puts it there, given the step's directory and a source of randomness.
        at_once: whether the lease is free at the first look; else after the silence only.
        number: the lease that is taken then.
    """

    write: Callable[[Path, random.Random], Any]
    at_once: bool
    number: int = 8


def _dead_process() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def _record(owner: Callable[[random.Random], Any], at_once: bool, number: int = 7) -> Remains:
    return Remains(
        lambda root, draw: write_lease(root, number, owner(draw)), at_once, number=number + 1
    )


def _dead_here(draw: random.Random) -> dict[str, Any]:
    # The start time of some process, as the record was written while its owner lived.
    return {**owner_here(1), "pid": _dead_process()}


def _reused_id(draw: random.Random) -> dict[str, Any]:
    return {**owner_here(os.getpid()), "process_start": float(draw.randint(1, 9))}


ELSEWHERE = {"host": "elsewhere boot namespace", "pid": 1, "process_start": 1.0}
_FOREIGN = (
    "notes.txt",
    "12.json",
    "0000012.json",
    "000007x.json",
    "²²²²²².json",
    "000009.json.bak",
)


def _half(draw: random.Random) -> str:
    text = '{"host": "here", "pid": 12, "process_start": 34.5}'
    return text[: draw.randint(1, len(text) - 1)]


def _shape(draw: random.Random) -> str:
    return draw.choice(('["here", 1]', '"here"', "7", "null", "true", '{"host": {"pid": 1}}'))


def _odd_id(draw: random.Random) -> dict[str, Any]:
    odd = draw.choice((-1, 0, 2**70, True, 1.5, "1", None, [1]))
    return {**owner_here(1), "pid": odd}


def _write_all(root: Path, names: tuple[str, ...]) -> None:
    (root / "leases").mkdir(parents=True)
    for name in names:
        (root / "leases" / name).write_text("{}")


def _directory(suffix: str) -> Callable[[Path, random.Random], Any]:
    def write(root: Path, draw: random.Random) -> None:
        base = root / "leases" / "000007"
        if suffix != ".json":
            write_lease(root, 7, ELSEWHERE)
        base.with_suffix(suffix).mkdir(parents=True)
        (base.with_suffix(suffix) / "inner").write_text("{}")

    return write


def _seven_digits(root: Path, draw: random.Random) -> None:
    for number in (999_999, 1_000_000):
        write_lease(root, number, _dead_here(draw))


REMAINS: dict[str, Remains] = {
    "empty": _record(lambda draw: "", False),
    "half a record": _record(_half, False),
    "JSON of another shape": _record(_shape, False),
    "deeply nested JSON": _record(lambda draw: "[" * 200_000, False),
    "not text": _record(lambda draw: draw.randbytes(100), False),
    "dead owner here": _record(_dead_here, True),
    "process id of another process": _record(_reused_id, True),
    "no such process id can be": _record(_odd_id, False),
    "silent owner elsewhere": _record(lambda draw: ELSEWHERE, False),
    "released without a record": Remains(
        lambda root, _: _write_all(root, ("000001.done",)), True, 2
    ),
    "heartbeat without a record": Remains(
        lambda root, _: _write_all(root, ("000001.beat",)), False, 2
    ),
    "directory as record": Remains(_directory(".json"), False),
    "directory as heartbeat": Remains(_directory(".beat"), False),
    "directory as release": Remains(_directory(".done"), True),
    "last number of six digits": _record(_dead_here, True, 999_999),
    "first number of seven digits": Remains(_seven_digits, True, 1_000_001),
    "foreign names": Remains(lambda root, _: _write_all(root, _FOREIGN), True, 1),
}
