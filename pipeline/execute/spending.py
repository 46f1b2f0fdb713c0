"""The hardware that attempts at steps held, its price, and what a run may still spend.

A step without a setting of type `Hardware` holds none. This machine and its CPUs have no price.
"""

from __future__ import annotations

import argparse
import functools
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pipeline.errors import InputError
from pipeline.execute.run_record import KILLED, RunRecord, StepRecord
from pipeline.graph.hardware import Hardware, pod
from pipeline.graph.step import Node
from pipeline.prices import VARIABLE, price_of

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def dollars_an_hour(hardware: str, *, spot: bool) -> float | None:
    """The dated price of the whole hardware; None where none is known."""
    place = place_of(hardware)
    price = price_of(place.generation) if place is not None and place.generation else None
    rate = None if price is None else price.spot if spot else price.on_demand
    return None if place is None or rate is None else rate * place.chips


def place_of(hardware: str) -> Hardware | None:
    """The hardware in a record; None for none, and for one of another version."""
    try:
        return pod(hardware)
    except InputError:
        return None


@dataclass(frozen=True)
class Use:
    """Hardware that one attempt at a step held; `preempted` if it was taken away."""

    step: StepRecord
    spot: bool
    began: float  # Unix seconds, once the hardware was there
    until: float
    preempted: bool

    @property
    def seconds(self) -> float:
        return max(0.0, self.until - self.began)

    @property
    def dollars(self) -> float | None:
        rate = dollars_an_hour(self.step.hardware, spot=self.spot)
        return None if rate is None else rate * self.seconds / 3600


def uses(record: RunRecord, now: float | None = None) -> Iterator[Use]:
    """The attempts of a run, of all steps; one that runs has lasted until `now`.

    A machine was taken away from the driver, or with it where that was killed on spot.
    """
    for step in list(record.steps.values()):  # another thread may add to it
        for attempt in list(step.attempts):
            lasts = attempt.ended is None
            began = attempt.started + attempt.waited
            until = began if lasts and attempt.waiting else attempt.ended or now or record.last
            killed = lasts and record.spot and record.ending == KILLED
            taken = killed or attempt.status == "preempted"
            yield Use(step, record.spot, began, until, taken)


def ledger(records: list[RunRecord]) -> list[dict[str, Any]]:
    """By experiment the hours, dollars and steps; the dearest first, then those of most hours.

    A step has one row for each hardware and each way of paying. Its dollars are None where no price
    is known, and an experiment's are the sum of the others.
    """
    found: dict[str, dict[str, Any]] = {}
    for record in records:
        empty = {"experiment": record.name, "attempts": 0, "hours": 0.0, "dollars": 0.0}
        for use in uses(record):
            whole = found.setdefault(record.name, {**empty, "steps": {}})
            name = {"step": use.step.label, "hardware": use.step.hardware, "spot": record.spot}
            row = {**name, "attempts": 0, "preempted": 0, "hours": 0.0, "dollars": 0.0}
            row = whole["steps"].setdefault(tuple(name.values()), row)
            row["preempted"] += use.preempted
            for each in (row, whole):
                each["attempts"] += 1
                each["hours"] += use.seconds / 3600
                each["dollars"] = (each["dollars"] or 0.0) + (use.dollars or 0.0)
            row["dollars"] = None if use.dollars is None else row["dollars"]
    for whole in found.values():
        whole["steps"] = sorted(whole["steps"].values(), key=_rank)
    return sorted(found.values(), key=_rank)


def _rank(row: dict[str, Any]) -> tuple[float, float]:
    return -(row["dollars"] or 0.0), -row["hours"]


@dataclass(frozen=True)
class Budget:
    """The most that one run may spend: dollars, or seconds of its own time. One of them is None."""

    dollars: float | None = None
    seconds: float | None = None

    @classmethod
    def parse(cls, text: str) -> Budget:
        match = re.fullmatch(r"(\$?)(\d{1,9}(?:\.\d+)?)([smhd]?)", text)
        if match is None or bool(match[1]) == bool(match[3]) or not float(match[2]):
            raise argparse.ArgumentTypeError(
                f"expected dollars such as '$40' (in quotes) or a time such as 3h, got {text!r}"
            )
        if match[1]:
            return cls(dollars=float(match[2]))
        return cls(seconds=float(match[2]) * _UNITS[match[3]])

    def __str__(self) -> str:
        """As it is typed."""
        amount = f"{self.seconds if self.dollars is None else self.dollars:.6f}"
        amount = amount.rstrip("0").rstrip(".")
        return f"{amount}s" if self.dollars is None else f"${amount}"

    def say(self, amount: float) -> str:
        return time_text(amount) if self.dollars is None else f"${amount:,.2f}"

    @property
    def most(self) -> float:
        return self.dollars or self.seconds or 0.0


class Spending:
    """What a run spends of its budget: refuses steps that exceed it, and says when it is reached.

    `predict` returns the seconds that a node's step is predicted to hold its hardware; None where
    that is not known. Such a step begins, and ends when the budget is reached. `earlier` are runs
    of the same command that were killed, and started again with the same budget.
    """

    def __init__(
        self,
        budget: Budget,
        record: RunRecord,
        predict: Callable[[Node], float | None] = lambda node: None,
        clock: Callable[[], float] = time.time,
        earlier: Iterable[RunRecord] = (),
        *,
        spot: bool = False,
    ) -> None:
        self._budget, self._record, self._predict, self._clock = budget, record, predict, clock
        self._spot = spot  # of the record once the run has started
        self._begun: dict[str, float] = {}  # predicted amount of each step that was let begin
        self._hourly = functools.cache(dollars_an_hour)  # the user's prices are read once
        self._before = sum(sum(self._amounts(each, each.last).values()) for each in earlier)

    def refusal(self, node: Node) -> str:
        """Why a step may not begin; empty where it may, and for one that had begun before."""
        if node.key in self._begun:
            return ""
        rate = self._rate(node)
        if not rate:
            return ""
        seconds = self._predict(node)
        amount, rest = rate * (seconds or 0.0), self._budget.most - self._spent(promised=True)
        if amount <= rest:
            self._begun[node.key] = amount
            return ""
        price = "" if self._budget.dollars is None else f" at ${rate * 3600:,.2f} an hour"
        place = hardware_name(node) or "this machine"
        hours = f"{time_text(seconds or 0.0)} of {place}{price}"
        if rest <= 0.0:
            spent = self._budget.say(self._spent(promised=True))
            return (
                f"budget: {self._budget} is spent ({spent}, with earlier runs of this command that "
                "were cut off); raise --budget"
            )
        return (
            f"budget: expected at most {self._budget.say(rest)}, which is left of {self._budget}, "
            f"found {self._budget.say(amount)} by the plan's middle ({hours}); raise --budget, or "
            "choose fewer steps or other hardware (`ponente plan`)"
        )

    def check(self, nodes: Iterable[Node], graph: Iterable[Node]) -> None:
        """Raise `InputError` for steps that exceed the whole budget, before anything runs."""
        self.check_prices(graph)
        refusals = [f"{n.label}: {why}" for n in nodes if (why := self.refusal(n))]
        self._begun.clear()
        if refusals:
            raise InputError("\n".join(refusals))

    def check_prices(self, graph: Iterable[Node]) -> None:
        """Raise `InputError` for hardware without a price, and for dollars where nothing costs."""
        if not sum(map(self._rate, graph)):
            raise InputError(
                f"budget: expected steps on hardware with a price for {self._budget}, found none; "
                "give a time such as --budget 3h"
            )

    def reached(self) -> str:
        """Why the run has to stop; empty while something is left."""
        spent = self._spent()
        if spent < self._budget.most:
            return ""
        return (
            f"stopping: the budget of {self._budget} is reached ({self._budget.say(spent)} spent); "
            "training saves a checkpoint"
        )

    def _rate(self, node: Node) -> float:
        """What a second of a node's step takes of the budget; `InputError` if it has no price."""
        name = hardware_name(node)
        if self._budget.dollars is None:
            return 1.0
        if not name or not pod(name).generation:
            return 0.0
        if (rate := self._hourly(name, spot=self._spot)) is None:
            kind = "spot" if self._spot else "on demand"
            raise InputError(
                f"budget: expected a price of {name} {kind} for {self._budget}, found none; give a "
                f"time such as --budget 3h, or prices in a file that {VARIABLE} names"
            )
        return rate / 3600

    def _spent(self, *, promised: bool = False) -> float:
        """What is spent, if `promised` with what running steps will still spend as predicted."""
        spent = self._amounts(self._record, self._clock())
        if self._budget.dollars is not None and promised:  # steps that run at once share the time
            for step in self._record.among("running", "waiting"):
                spent[step.key] = max(spent.get(step.key, 0.0), self._begun.get(step.key, 0.0))
        return self._before + sum(spent.values())

    def _amounts(self, record: RunRecord, now: float) -> dict[str, float]:
        """What the steps of a run have spent until now, by key; one amount of time for all."""
        if self._budget.dollars is None:
            return {"": now - record.started}
        spent: dict[str, float] = {}
        for use in uses(record, now):
            rate = self._hourly(use.step.hardware, spot=self._spot) or 0.0
            amount = rate * use.seconds / 3600
            spent[use.step.key] = spent.get(use.step.key, 0.0) + amount
        return spent


def time_text(seconds: float) -> str:
    units = (("h", 3600.0), ("min", 60.0), ("s", 1.0))
    name, each = next(u for u in units if abs(seconds) >= 2 * u[1] or u[0] == "s")
    return f"{seconds / each:,.3g} {name}"


def hardware_name(node: Node) -> str:
    """The hardware that a node's step is to run on; empty for a step that declares none."""
    return next((place.name for place in node.hardware), "")
