"""Check the plans that were chosen by formula with the TPU compiler."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from pipeline import InputError
from steps.training.plan.declared_run import DeclaredRun
from steps.tuning.candidates import CHANGES
from steps.tuning.search import Plan, Search
from training.preflight import check

_AT_ONCE = 2
"""Concurrent compilations; each takes a core for minutes and gigabytes of memory."""
_STEPS = 1000
"""Steps of the schedule if they are unknown; a constant of the program that costs no memory."""


def compile_fastest(
    search: Search, run: DeclaredRun, most: int, show: Callable[[str], None]
) -> Search:
    """The search with the compiler's verdict on the fastest plan of each kind.

    If a plan does not fit, the next fastest one is compiled.

    Args:
        show: called with progress lines while the compiler runs, from several threads.
    """
    compiled = 0
    while compiled < most:
        unknown = [plan for plan in _fastest(search) if plan.compiled is None]
        wanted = unknown[: most - compiled]
        if not wanted:
            break
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            for plan, new in zip(wanted, threads.map(_compiler(run, show), wanted), strict=True):
                compiled += 1
                search = _replaced(search, plan, new)
    return search


def _fastest(search: Search) -> list[Plan]:
    """The best plan for every kind of change, without repetitions."""
    best = [plan for kind in CHANGES if (plan := search.best(kind, certain=False)) is not None]
    return list({id(plan): plan for plan in best}.values())


def _compiler(run: DeclaredRun, show: Callable[[str], None]) -> Callable[[Plan], Plan]:
    def compiled(plan: Plan) -> Plan:
        train = dataclasses.replace(plan.fit.train, steps=run.steps or _STEPS)
        name = run.hardware.name
        try:
            verdict = check(plan.candidate.model, run.optimizer, train, name, show)
        except InputError as error:  # the compiler failed and reports no memory
            show(str(error))
            verdict = {"fits": False, "peak_gib": None, "need_gib": None, "error": str(error)}
        return dataclasses.replace(plan, compiled=verdict)

    return compiled


def _replaced(search: Search, old: Plan, new: Plan) -> Search:
    fronts = {
        kind: [new if plan is old else plan for plan in plans]
        for kind, plans in search.fronts.items()
    }
    return dataclasses.replace(search, fronts=fronts)
