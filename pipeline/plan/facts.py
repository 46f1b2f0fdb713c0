"""The facts of the steps that a run would execute, see `pipeline.graph.facts`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

from pipeline.errors import InputError, PonenteError
from pipeline.graph.facts import Facts, Results
from pipeline.graph.step import Node

AT_ONCE = 4
"""Concurrent examinations; each may start a process."""


def state(nodes: Iterable[Node], results: Results) -> dict[str, Facts]:
    """Facts of the nodes whose steps have `facts`, by key; a `PonenteError` becomes a refusal."""
    stated = {}
    for node in nodes:
        if node.step.facts is None:
            continue
        try:
            stated[node.key] = node.step.facts(node, results)
        except PonenteError as error:
            stated[node.key] = Facts(refusal=str(error))
    return stated


def examine(
    stated: Mapping[str, Facts], labels: Mapping[str, str], show: Callable[[str], None]
) -> dict[str, Facts]:
    """The facts that the examinations return, by key; `AT_ONCE` of them run concurrently.

    `show` is called with lines on their progress, from several threads.
    """
    looks = {k: f.examine for k, f in stated.items() if f.examine is not None and not f.refusal}
    if not looks:
        return {}

    def look(key: str) -> Facts:
        try:
            return looks[key](lambda line: show(f"{labels[key]}: {line}"))
        except PonenteError as error:
            return Facts(refusal=str(error))

    with ThreadPoolExecutor(AT_ONCE) as threads:
        return dict(zip(looks, threads.map(look, looks), strict=True))


def merge(first: Facts, second: Facts) -> Facts:
    return dataclasses.replace(
        second,
        lines=(*first.lines, *second.lines),
        data={**first.data, **second.data},
        refusal=first.refusal or second.refusal,
        seconds=first.seconds,
    )


def refuse(stated: Mapping[str, Facts], labels: Mapping[str, str]) -> None:
    refusals = [f"{labels[key]}: {facts.refusal}" for key, facts in stated.items() if facts.refusal]
    if refusals:
        raise InputError("\n".join(refusals))
