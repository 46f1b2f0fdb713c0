"""The candidates that fit by formula, and of these the fastest for every amount of memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline import InputError
from pipeline.accelerators import Chip
from steps.planning.declared_run import DeclaredRun
from steps.planning.memory import CERTAIN, Fit, fit
from steps.tuning.candidates import CHANGES, NOTHING, Candidate, candidates
from training.cost.step_forecast import Forecast, forecast

_SHOW_EVERY = 500
_SAVING = 0.03


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A candidate with what is known of it.

    Attributes:
        candidate: the settings.
        fit: by formula; its `train` has no "auto".
        step: the predicted step.
        compiled: what the compiler says (`training.compile_check.check`); None where it was not
            asked.
    """

    candidate: Candidate
    fit: Fit
    step: Forecast
    compiled: Mapping[str, Any] | None = None

    @property
    def seconds_per_token(self) -> float:
        """Predicted, of the whole slice; batches of different sizes compare by it."""
        return self.step.seconds / self.step.tokens

    @property
    def bytes(self) -> float:
        """Of one device, by formula."""
        return self.fit.estimate.total

    @property
    def may_fit(self) -> bool:
        """Whether the compiler, where it was asked, has not refused it."""
        return self.compiled is None or bool(self.compiled["fits"])

    @property
    def fits(self) -> bool:
        """By the compiler where it was asked, else by formula."""
        return self.fit.fits if self.compiled is None else self.may_fit


@dataclass(frozen=True, kw_only=True)
class Search:
    """What a search found.

    Attributes:
        declared: the run as it is declared, with its "auto" resolved; None where it cannot be.
        tried: candidates.
        fitting: of these, how many fit by formula.
        fronts: by `CHANGES`, see `front`.
    """

    declared: Plan | None
    tried: int
    fitting: int
    fronts: Mapping[str, Sequence[Plan]]

    def best(self, changes: str, *, certain: bool = True) -> Plan | None:
        """The fastest that fits and changes no more than `changes`.

        Args:
            changes: one of `CHANGES`.
            certain: leave out what is above the limit by formula, if the compiler was not asked.
        """
        allowed = CHANGES[: CHANGES.index(changes) + 1]
        plans = [plan for kind in allowed for plan in self.fronts.get(kind, ())]
        found = [plan for plan in plans if (plan.fits if certain else plan.may_fit)]
        return min(found, key=lambda plan: plan.seconds_per_token, default=None)

    def chosen(self) -> dict[str, Plan]:
        """By `CHANGES`, the best plans, each faster than the one that changes less."""
        found: dict[str, Plan] = {}
        for kind in CHANGES:
            plan = self.best(kind)
            if plan is not None and plan not in found.values():
                found[kind] = plan
        return found


def search(
    run: DeclaredRun,
    chip: Chip,
    *,
    batches: Sequence[int] = (),
    uncertain: bool = False,
    show: Callable[[str], None] = lambda _: None,
) -> Search:
    """All candidates by formula.

    Args:
        run: what is declared.
        chip: its hardware's.
        batches: other sizes of a batch to try.
        uncertain: keep what may fit although the formula is above the limit, for a compiler.
        show: is called with lines on how far it is.
    """
    most = CERTAIN if uncertain else 1.0
    tried, kept = 0, []
    for candidate in candidates(run, batches):
        tried += 1
        if not tried % _SHOW_EVERY:
            show(f"{tried:,} candidates, {len(kept):,} may fit")
        kept += [
            plan
            for plan in _recomputing(run, chip, candidate)
            if plan.bytes <= most * plan.fit.limit
        ]
    return Search(
        declared=_declared(run, chip),
        tried=tried,
        fitting=sum(plan.fit.fits for plan in kept),
        fronts={kind: front(p for p in kept if p.candidate.changes == kind) for kind in CHANGES},
    )


def _recomputing(run: DeclaredRun, chip: Chip, candidate: Candidate) -> Iterator[Plan]:
    """The candidate with nothing recomputed, or what has to be; and with ever more of it."""
    nothing = _plan(run, chip, candidate, "matmuls")
    if nothing is not None:
        yield nothing
    for remat in ("attention", "full") if nothing and nothing.fits else ("auto", "full"):
        if (plan := _plan(run, chip, candidate, remat)) is not None:
            yield plan


def _plan(run: DeclaredRun, chip: Chip, candidate: Candidate, remat: str) -> Plan | None:
    """What the formulas say; None for what the devices cannot be divided into."""
    place = candidate.train.parallel.optimizer_memory
    if place == "auto" and remat != "auto":
        place = "device"
    train = dataclasses.replace(
        candidate.train,
        remat=remat,
        parallel=dataclasses.replace(candidate.train.parallel, optimizer_memory=place),
    )
    try:
        found = fit(candidate.model, run.optimizer, train, run.hardware)
    except InputError:
        return None
    devices, slices = run.hardware.devices, run.hardware.slices
    step = forecast(candidate.model, run.optimizer, found.train, chip, devices, slices)
    return Plan(candidate=candidate, fit=found, step=step)


def _declared(run: DeclaredRun, chip: Chip) -> Plan | None:
    own = Candidate(model=run.model, train=run.train, changes=NOTHING)
    return _plan(run, chip, own, run.train.remat)


def front(plans: Iterable[Plan]) -> list[Plan]:
    """The plans for which no other is as fast with as little memory, the fastest first.

    One that saves less than `_SAVING` of the memory of the one before is left out.
    """
    found: list[Plan] = []
    for plan in sorted(plans, key=lambda plan: (plan.seconds_per_token, plan.bytes)):
        if not found or plan.bytes < (1 - _SAVING) * found[-1].bytes:
            found.append(plan)
    return found
