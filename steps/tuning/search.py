"""Search the candidates that fit by formula for the fastest at every amount of memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline import InputError
from pipeline.accelerators import Chip
from steps.training.plan.declared_run import DeclaredRun
from steps.training.plan.memory import CERTAIN, Fit, fit
from steps.tuning.candidates import CHANGES, NOTHING, Candidate, candidates
from training.cost.step_time import Forecast, forecast

_SHOW_EVERY = 500
_SAVING = 0.03


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A candidate with its predicted memory and time.

    Attributes:
        candidate: the settings.
        fit: memory by formula; its `train` has no "auto".
        step: the predicted step time.
        compiled: the compiler's verdict (`training.preflight.check`); None if not compiled.
    """

    candidate: Candidate
    fit: Fit
    step: Forecast
    compiled: Mapping[str, Any] | None = None

    @property
    def seconds_per_token(self) -> float:
        """Predicted seconds per token of the whole slice, comparable between batch sizes."""
        return self.step.seconds / self.step.tokens

    @property
    def bytes(self) -> float:
        """Bytes of one device, by formula."""
        return self.fit.estimate.total

    @property
    def may_fit(self) -> bool:
        """Whether the compiler has not refused the plan; true if it was not compiled."""
        return self.compiled is None or bool(self.compiled["fits"])

    @property
    def fits(self) -> bool:
        """Whether the plan fits, by the compiler if it was compiled, else by formula."""
        return self.fit.fits if self.compiled is None else self.may_fit


@dataclass(frozen=True, kw_only=True)
class Search:
    """The result of a search.

    Attributes:
        declared: the declared run, with its "auto" resolved; None if its sizes do not divide.
        tried: number of candidates.
        fitting: number of plans that fit by formula.
        fronts: fastest plans by `CHANGES`, see `front`.
    """

    declared: Plan | None
    tried: int
    fitting: int
    fronts: Mapping[str, Sequence[Plan]]

    def best(self, changes: str, *, certain: bool = True) -> Plan | None:
        """The fastest plan that fits and changes no more than `changes`.

        Args:
            certain: leave out plans that are above the limit by formula and were not compiled.
        """
        allowed = CHANGES[: CHANGES.index(changes) + 1]
        plans = [plan for kind in allowed for plan in self.fronts.get(kind, ())]
        found = [plan for plan in plans if (plan.fits if certain else plan.may_fit)]
        return min(found, key=lambda plan: plan.seconds_per_token, default=None)

    def chosen(self) -> dict[str, Plan]:
        """The best plans by `CHANGES`, each faster than the plans that change less."""
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
    """Predict memory and time of all candidates by formula, and keep the fastest.

    Args:
        uncertain: also keep plans above the limit by formula that the compiler may find to fit.
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
    """The candidate under several remat policies, from the least recomputation to the most."""
    least = _plan(run, chip, candidate, "matmuls")  # keeps all matmuls
    if least is not None:
        yield least
    for remat in ("attention", "full") if least and least.fits else ("auto", "full"):
        if (plan := _plan(run, chip, candidate, remat)) is not None:
            yield plan


def _plan(run: DeclaredRun, chip: Chip, candidate: Candidate, remat: str) -> Plan | None:
    """The plan of a candidate under a remat policy; None if its sizes do not divide."""
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
    """The Pareto front of time and memory, the fastest plan first.

    A plan that saves less than the share `_SAVING` of its predecessor's memory is left out.
    """
    found: list[Plan] = []
    for plan in sorted(plans, key=lambda plan: (plan.seconds_per_token, plan.bytes)):
        if not found or plan.bytes < (1 - _SAVING) * found[-1].bytes:
            found.append(plan)
    return found
