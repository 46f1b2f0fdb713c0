"""What the TPU compiler says of the plans that were chosen by formula."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from pipeline import InputError
from steps.planning.declared_run import DeclaredRun
from steps.tuning.candidates import CHANGES
from steps.tuning.search import Plan, Search
from training.compile_check import check

_AT_ONCE = 2
"""Compilers; each takes a core for minutes and gigabytes of memory."""
_STEPS = 1000
"""Of the schedule in the program where they are not known; a number in it."""


def ask(search: Search, run: DeclaredRun, most: int, show: Callable[[str], None]) -> Search:
    """The search with the compiler's verdict on the fastest plan of each kind.

    Where one does not fit, the next in line is asked.

    Args:
        search: by formula.
        run: what is declared.
        most: plans to ask for.
        show: is called with lines while the compiler runs, from several threads.
    """
    asked: dict[int, Plan] = {}
    while len(asked) < most:
        unknown = [plan for plan in _fastest(search) if plan.compiled is None]
        wanted = unknown[: most - len(asked)]
        if not wanted:
            break
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            for plan, new in zip(wanted, threads.map(_asker(run, show), wanted), strict=True):
                asked[id(plan)] = new
                search = _replaced(search, plan, new)
    return search


def _fastest(search: Search) -> list[Plan]:
    """The best plans, by how much they change, without those that gain nothing by it."""
    best = [plan for kind in CHANGES if (plan := search.best(kind, certain=False)) is not None]
    return list({id(plan): plan for plan in best}.values())


def _asker(run: DeclaredRun, show: Callable[[str], None]) -> Callable[[Plan], Plan]:
    def look(plan: Plan) -> Plan:
        train = dataclasses.replace(plan.fit.train, steps=run.steps or _STEPS)
        name = run.hardware.name
        try:
            verdict = check(plan.candidate.model, run.optimizer, train, name, show)
        except InputError as error:  # of the compiler, which then says nothing of memory
            show(str(error))
            verdict = {"fits": False, "peak_gib": None, "need_gib": None, "error": str(error)}
        return dataclasses.replace(plan, compiled=verdict)

    return look


def _replaced(search: Search, old: Plan, new: Plan) -> Search:
    fronts = {
        kind: [new if plan is old else plan for plan in plans]
        for kind, plans in search.fronts.items()
    }
    return dataclasses.replace(search, fronts=fronts)
