"""What a verb is given, and how it speaks."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pipeline.errors import InputError
from pipeline.graph.node import Node, topological, unique_labels
from pipeline.plan.state import Selection, pick
from pipeline.store.outputs import Store


@dataclass(frozen=True)
class Context:
    """One invocation of an experiment's command line.

    Attributes:
        targets: what the experiment wants under its settings.
        all_targets: what it wants under any of its presets too.
        store: where outputs are.
        settings: the resolved settings.
        options: the engine's flags (see `options.parser`).
        words: what was said after the verb.
        clock: `time.perf_counter()` when the command began.
    """

    targets: list[Node]
    all_targets: Callable[[], list[Node]]
    store: Store
    settings: Any
    options: argparse.Namespace
    words: list[str]
    clock: float

    @property
    def choice(self) -> Selection:
        """Which part of the graph the flags ask for."""
        o = self.options
        return Selection(o.only, o.until, o.force, o.keep_going, o.jobs)

    def steps(self) -> list[Node]:
        """The steps named after the verb; every step when none is."""
        order = topological(self.targets)
        return [node for word in self.words for node in pick(order, word)] or order

    def step(self) -> Node:
        """The one step named after the verb. Raises `InputError` when there is not just one."""
        order = topological(self.targets)
        chosen = pick(order, " ".join(self.words))
        if len(chosen) > 1:
            apart = unique_labels(order)
            names = ", ".join(apart[node.key] for node in chosen)
            raise InputError(f"{self.words[0]!r} is several steps; name one: {names}")
        return chosen[0]


def retry_command() -> str:
    """The command that was given, to be given again."""
    return shlex.join([os.path.basename(sys.executable), *sys.argv])


def say(text: str = "", *, error: bool = False) -> None:
    """Print one line of the command's own output."""
    print(text, file=sys.stderr if error else sys.stdout, flush=True)
