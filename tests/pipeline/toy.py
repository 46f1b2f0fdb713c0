"""A small graph without machine learning, for the engine's tests: workers can import it."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pipeline import Artifact, InputError, Result, Runtime, StepContext, step
from pipeline.store import storage


class Numbers(Artifact):
    """Integers, one text file a shard."""

    def values(self) -> list[int]:
        texts = (
            storage.read_bytes(storage.join(self.shard(s.name), "n.txt")) for s in self.shards()
        )
        return [int(word) for text in texts for word in text.split()]


class Total(Artifact):
    """One number, in the result."""


class Order(Artifact):
    """Says only how many numbers there are, and opens them."""

    opens = ("numbers",)


@dataclass(frozen=True)
class Scale:
    """A config with a part that matters and a part that does not."""

    factor: int = 1
    note: Annotated[str, Runtime] = ""


def write_numbers(directory: str, item: tuple[int, int]) -> Mapping[str, Any]:
    """Shard writer: `count` numbers from `first`; marks its run in `PONENTE_MARKS`."""
    first, count = item
    if marks := os.environ.get("PONENTE_MARKS"):
        with open(marks, "a") as file:
            file.write(f"{first}\n")
    with storage.open_write(storage.join(directory, "n.txt")) as file:
        file.write(" ".join(str(n) for n in range(first, first + count)).encode())
    return {"count": count}


@step(output=Numbers, version=1)
def numbers(run: StepContext, *, count: int, shards: int = 2) -> Result:
    size = count // shards
    items = {f"part/{i:03d}": (i * size, size) for i in range(shards)}
    written = run.map(write_numbers, items)
    return {"count": sum(s.result["count"] for s in written.values())}


@step(output=Numbers, version=1)
def scaled(
    run: StepContext, numbers: Numbers, *, scale: Scale, delay: Annotated[float, Runtime] = 0
) -> Result:
    del delay
    if "all" in run.finished():
        return {"sum": sum(numbers.values()) * scale.factor}
    with (
        run.shard("all") as directory,
        storage.open_write(storage.join(directory, "n.txt")) as file,
    ):
        file.write(" ".join(str(n * scale.factor) for n in numbers.values()).encode())
    return {"sum": sum(numbers.values()) * scale.factor}


def advise_against_zero(settings: Mapping[str, Any]) -> list[str]:
    return ["a limit of 0 makes every number 0"] if settings["limit"] == 0 else []


def refuse_negative(arguments: Mapping[str, Any]) -> None:
    if arguments["limit"] < 0:
        raise InputError(f"clamp.limit: expected 0 or more, got {arguments['limit']}")


@step(output=Numbers, version=1, advise=advise_against_zero, check=refuse_negative)
def clamp(run: StepContext, numbers: Numbers, *, limit: int) -> Result:
    """The numbers, none above the limit: two limits can make the same."""
    return _write(run, [min(n, limit) for n in numbers.values()])


@step(output=Numbers, version=1)
def noise(run: StepContext, numbers: Numbers) -> Result:
    """Other numbers every time; fails when `PONENTE_TOY_FAIL` names it."""
    written = _write(run, [n + int.from_bytes(os.urandom(4)) for n in numbers.values()])
    if os.environ.get("PONENTE_TOY_FAIL") == "noise":
        raise InputError("told to fail")
    return written


def _write(run: StepContext, values: list[int]) -> Result:
    with run.shard("all") as directory:
        url = storage.join(directory, "n.txt")
        storage.write_atomic(url, " ".join(str(n) for n in values).encode())
    return {"count": len(values)}


@step(output=Order, version=1)
def order(run: StepContext, numbers: Numbers) -> Result:
    """An order over the numbers, which is the same for any that are as many."""
    return {"count": len(numbers.values())}


@step(output=Order, version=1)
def orders(run: StepContext, numbers: tuple[Numbers, ...]) -> Result:
    return {"count": sum(len(part.values()) for part in numbers)}


@step(output=Total, version=1)
def opened_many(run: StepContext, order: Order) -> Result:
    """The sums of what an order of several is over, in the order of the inputs."""
    return {"totals": [sum(part.values()) for part in order.inputs("numbers", Numbers)]}


@step(output=Total, version=1)
def opened(run: StepContext, order: Order) -> Result:
    return {"total": sum(order.input("numbers", Numbers).values())}


@step(output=Total, version=1, reads_lineage=True)
def shown(run: StepContext, left: Total) -> Result:
    return {"recipe": left.manifest.inputs}


@step(output=Total, version=1)
def total(run: StepContext, left: Numbers, right: Numbers | None = None) -> Result:
    both = left.values() + (right.values() if right is not None else [])
    return {"total": sum(both), "headline": [f"total {sum(both)}"]}


@step(output=Total, version=1)
def refuse(run: StepContext, left: Numbers) -> Result:
    raise InputError(f"expected something else than {len(left.values())} numbers")


@step(output=Total, version=1)
def kill_once(run: StepContext, left: Numbers, *, flag: str) -> Result:
    """Kills its own process the first time, succeeds the second."""
    if not Path(flag).exists():
        Path(flag).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return {"total": sum(left.values())}
