"""The context of one command (experiment, store, settings, flags), and its output lines."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pipeline.cli import options as flags
from pipeline.errors import InputError
from pipeline.graph.capacity import Capacity
from pipeline.graph.declaration import FULL, Declaration, nodes
from pipeline.graph.order import topological, unique_labels
from pipeline.graph.step import Node
from pipeline.identity.secret_text import redacted, refuse_secrets
from pipeline.plan.state import Selection, pick
from pipeline.store.outputs import Store


@dataclass(frozen=True)
class Context:
    """One invocation of a verb; `unforced` is its command without --force."""

    experiment: Declaration[Any] | None
    wanted: Any
    store: Store
    settings: Any
    options: argparse.Namespace
    words: list[str]
    command: list[str]
    unforced: list[str]
    clock: float

    @property
    def targets(self) -> list[Node]:
        return nodes(self.wanted)

    @property
    def preset(self) -> str:
        return getattr(self.options, "preset", None) or FULL

    @property
    def choice(self) -> Selection:
        o = self.options
        return Selection(
            only=_texts(getattr(o, "only", ())),
            until=_texts(getattr(o, "until", ())),
            force=_texts(getattr(o, "force", ())),
            keep_going=getattr(o, "keep_going", False),
            jobs=getattr(o, "jobs", 0),
            keep_shards=getattr(o, "keep_shards", False),
        )

    @property
    def capacity(self) -> Capacity:
        """What the flags say of the machines."""
        given = getattr(self.options, "preemptions", None)
        return given or Capacity(spot=getattr(self.options, "spot", False))

    def steps(self) -> list[Node]:
        """The steps named after the verb; every step if none is named."""
        order = topological(self.targets)
        return [node for word in self.words for node in pick(order, word)] or order

    def step(self) -> Node:
        """The one step named after the verb. Raises `InputError` for none or several."""
        order = topological(self.targets)
        labels = unique_labels(order)
        if len(self.words) != 1:
            found = "none" if not self.words else " ".join(self.words)
            raise InputError(f"expected one step of {', '.join(labels.values())}; found {found}")
        chosen = pick(order, self.words[0])
        if len(chosen) > 1:
            names = ", ".join(labels[node.key] for node in chosen)
            raise InputError(f"{self.words[0]!r} matches several steps; name one: {names}")
        return chosen[0]


def of_command(
    experiment: Declaration[Any] | None,
    parsed: tuple[argparse.Namespace, list[str], Any],
    clock: float,
    command: list[str] | None = None,
    unforced: list[str] | None = None,
) -> Context:
    """The context of a verb's flags, words and settings; `command` is that of this process."""
    options, words, settings = parsed
    wanted = () if experiment is None else experiment.build(settings)
    link = getattr(options, "link", False)
    store = Store(options.prefix, getattr(options, "shared", ()), link=link)
    command = redacted(command or _command_line())
    unforced = redacted(unforced or _without_force(command))
    return Context(experiment, wanted, store, settings, options, words, command, unforced, clock)


def of_call(
    experiment: Declaration[Any], verb: str, preset: str | None, settings: dict[str, Any]
) -> Context:
    """The context of a call in Python; `settings` may also hold the verb's flags."""
    clock = time.perf_counter()
    refuse_secrets(f"--{name.replace('_', '-')}={value}" for name, value in settings.items())
    options = flags.defaults(verb)
    options.preset = preset
    own = {n: flags.of_python(verb, n, v) for n, v in settings.items() if n in vars(options)}
    vars(options).update(own)
    resolved = experiment.settings(preset, **{k: v for k, v in settings.items() if k not in own})
    words = [repr(preset)] if preset else []

    def call(given: dict[str, Any]) -> list[str]:
        named = [f"{name}={value!r}" for name, value in given.items()]
        return [f"{experiment.name}.{verb}({', '.join([*words, *named])})"]

    unforced = call({name: value for name, value in settings.items() if name != "force"})
    return of_command(experiment, (options, [], resolved), clock, call(settings), unforced)


def _without_force(command: list[str]) -> list[str]:
    left, words = [], iter(command)
    for word in words:
        if word == "--force":
            next(words, None)
        elif not word.startswith("--force="):
            left.append(word)
    return left


def _texts(names: str | Iterable[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def _command_line() -> list[str]:
    program, *arguments = sys.argv
    name = os.path.basename(program)
    if name == "ponente":
        return [name if shutil.which(name) == program else program, *arguments]
    python = min(os.path.relpath(sys.executable), sys.executable, key=len)
    return [python, program, *arguments]


def file_among(words: Iterable[str]) -> list[str]:
    """The first word that names an experiment's file, if there is one."""
    return [word for word in words if word.endswith(".py") or ".py:" in word][:1]


def step_command(context: Context, step: str) -> str:
    """The command line of `plan` for one step, with the same settings and store."""
    typed = [*context.command, "plan", "FILE"]  # a call in Python has neither
    at = typed.index("plan")
    return shlex.join([*typed[: at + 1], *file_among(typed[at:]), step, *given(context)])


def given(context: Context) -> list[str]:
    """The flags that name the same settings and store."""
    o, default = context.options, flags.defaults("plan")
    more = [] if o.preset is None else ["--preset", o.preset]
    more += [] if o.prefix == default.prefix else ["--prefix", o.prefix]
    more += [] if o.shared == default.shared else ["--shared", ",".join(o.shared)]
    return [*more, *getattr(o, "overrides", ())]


def say(text: str = "", *, error: bool = False) -> None:
    print(text, file=sys.stderr if error else sys.stdout, flush=True)
