"""`ponente tune`: find faster or smaller settings of a train step, by formula and compiler.

ponente tune experiments/tomat_200m.py
ponente tune experiments/tomat_1b.py --compile 2 --out tuned
ponente tune experiments/tpuchat_130m.py --hardware v5e-8 --batches 32 128

It searches microbatches, remat policies, sharding over data, positions and heads, other batches if
given, and other head sizes with as many parameters. It runs no training and rents no hardware.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
from dataclasses import dataclass
from functools import partial
from typing import Any

from pipeline import InputError
from pipeline.accelerators import Chip
from pipeline.cli import options as engine
from pipeline.cli.context import say
from pipeline.errors import UsageError
from pipeline.graph.declaration import Declaration, load_experiment, nodes
from pipeline.graph.order import topological, unique_labels
from pipeline.graph.step import Node
from pipeline.store import storage
from steps.platforms import chip_of
from steps.training.plan.declared_run import DeclaredRun, declared_run
from steps.tuning.search import CHANGES, Plan, Search, compile_fastest, search
from steps.tuning.table import HEAD, MEANING, cells, data, flags, render, rows
from training.cost import step_time

_ROWS = 5  # most rows of each kind in the terminal
_PLANS = 3  # plans to compile by default
_PROGRAM = "ponente tune FILE"


@dataclass(frozen=True)
class Tuning:
    """The step to tune; `words` are file, preset and settings of the command line."""

    label: str
    run: DeclaredRun
    chip: Chip
    words: list[str]
    settings: Any

    def command(self, plan: Plan) -> str:
        """The command that runs the experiment as planned; its flags replace given ones."""
        more = flags(plan, self.run, self.settings)
        kept, dropping = [], False
        for word in self.words:
            if word.startswith("--"):
                dropping = word.partition("=")[0] in more
            if not dropping:
                kept.append(word)
        return shlex.join(["ponente", "run", *kept, *more])


def run(arguments: list[str]) -> int:
    """Search, compile the best plans, print and write the result; returns the exit status 0."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if options.help:
        parser.print_help()
        return 0
    tuning = _tuning(rest, options.step)
    compile, show = _plans_to_compile(options.compile, tuning), partial(say, error=True)
    batches, uncertain = options.batches, bool(compile)
    found = search(tuning.run, tuning.chip, batches=batches, uncertain=uncertain, show=show)
    found = compile_fastest(found, tuning.run, compile, show)
    if options.json:
        say(json.dumps(_plain(tuning, found), indent=2))
    else:
        _print(tuning, found)
    if options.out:
        _write(storage.normalise(options.out), tuning, found)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = engine.UsageParser(
        prog=_PROGRAM,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
        allow_abbrev=False,
        usage=f"{_PROGRAM} [flags] [presets and settings, as for plan]",
    )
    add = parser.add_argument
    add("-h", "--help", action="store_true")
    add("--step", help="label of the step to tune, if several train (default: the first)")
    add("--batches", type=int, nargs="+", default=(), help="more batch sizes to try, in sequences")
    add(
        "--compile",
        type=int,
        metavar="N",
        help=f"plans to check with the TPU compiler, minutes each ({_PLANS} with libtpu installed)",
    )
    add("--out", metavar="DIR", help="write index.html, tune.json and arguments.txt there")
    add("--json", action="store_true", help="print all of it as JSON")
    return parser


def _plans_to_compile(requested: int | None, tuning: Tuning) -> int:
    possible = tuning.run.hardware.kind == "tpu" and importlib.util.find_spec("libtpu") is not None
    if requested and not possible:
        raise InputError(
            "--compile: needs a TPU slice as hardware, and libtpu, which `make` installs"
        )
    if requested is not None:
        return requested
    return _PLANS if possible and not os.environ.get("PONENTE_NO_COMPILE") else 0


def _tuning(rest: list[str], step: str | None) -> Tuning:
    file = next((word for word in rest if word.endswith(".py") or ".py:" in word), None)
    if file is None:
        raise UsageError(f"{_PROGRAM}: expected an experiment's Python file")
    others = [word for word in rest if word != file]
    experiment = load_experiment(file)
    settings = _settings(experiment, others)
    label, node = _training_step(experiment, settings, step)
    found = declared_run(node, {})
    if found is None:
        raise InputError(
            f"{label}: its sequences are not built yet, so their length is unknown; give it"
        )
    chip = chip_of(found.hardware)
    if chip is None:
        raise InputError(
            f'{label}: hardware "{found.hardware.name}" has no chip of a known kind; name a '
            "slice, such as --hardware v6e-8"
        )
    return Tuning(label, found, chip, [file, *others], settings)


def _settings(experiment: Declaration[Any], words: list[str]) -> Any:
    """The settings from presets and flags. Raises `UsageError` for other flags of `plan`."""
    options, _, settings = engine.parse("plan", words, experiment, _PROGRAM)
    usual = vars(engine.defaults("plan"))
    given = {name for name in usual if vars(options)[name] != usual[name]}
    if wrong := sorted(given - {"preset", "prefix", "shared"}):
        raise UsageError(f"{_PROGRAM}: no flag --{wrong[0].replace('_', '-')}; see --help")
    return settings


def _training_step(
    experiment: Declaration[Any], settings: Any, step: str | None
) -> tuple[str, Node]:
    order = topological(nodes(experiment.build(settings)))
    labels = unique_labels(order)
    trains = {labels[n.key]: n for n in order if {"optimizer", "train"} <= n.config.keys()}
    if not trains:
        raise InputError(f"{experiment.name} has no step that trains")
    if step is None:
        return next(iter(trains.items()))
    if step not in trains:
        raise InputError(f"--step: expected one of {', '.join(trains)}, found {step}")
    return step, trains[step]


def _head(tuning: Tuning, found: Search) -> list[str]:
    hardware = tuning.run.hardware
    return [
        f"{tuning.label} on {hardware.name}",
        f"{found.tried:,} layouts, {found.fitting:,} plans fit by formula",
        f"predicted: median error {step_time.ERROR:.0%}, 90th percentile "
        f"{step_time.ERROR_90:.0%} on published runs",
    ]


def _print(tuning: Tuning, found: Search) -> None:
    say("; ".join(_head(tuning, found)))
    if found.declared is not None:
        _say_rows("as declared", [cells(found.declared, tuning.run, tuning.settings)])
    for kind, lines in rows(found, tuning.run, tuning.settings, _ROWS).items():
        _say_rows(MEANING[kind], lines)
    chosen = found.chosen()
    if not chosen:
        say("nothing fits: choose a smaller batch or a larger slice")
    for kind, plan in chosen.items():
        say(f"fastest, {MEANING[kind]}:")
        say(f"  {tuning.command(plan)}")


def _say_rows(title: str, lines: list[list[str]]) -> None:
    say(f"{title}:")
    table = [list(HEAD), *lines]
    wide = [max(len(line[column]) for line in table) for column in range(len(HEAD) - 1)]
    for line in table:
        first = "  ".join(cell.rjust(width) for cell, width in zip(line, wide, strict=False))
        say(f"  {first}  {line[-1]}")


def _plain(tuning: Tuning, found: Search) -> dict[str, Any]:
    def plain(plan: Plan) -> dict[str, Any]:
        return data(plan, tuning.run, tuning.settings)

    return {
        "step": tuning.label,
        "hardware": tuning.run.hardware.name,
        "tried": found.tried,
        "fitting": found.fitting,
        "declared": None if found.declared is None else plain(found.declared),
        "fronts": {kind or "nothing": [plain(p) for p in found.fronts[kind]] for kind in CHANGES},
        "chosen": {
            kind or "nothing": {**plain(plan), "command": tuning.command(plan)}
            for kind, plan in found.chosen().items()
        },
    }


def _write(out: str, tuning: Tuning, found: Search) -> None:
    chosen = found.chosen()
    commands = {kind: tuning.command(plan) for kind, plan in chosen.items()}
    table = rows(found, tuning.run, tuning.settings, 20)
    note = "Seconds are predicted from shapes (docs/predictions.md); nothing was run."
    files = {
        "index.html": render(tuning.label, _head(tuning, found), found, table, commands, note),
        "tune.json": json.dumps(_plain(tuning, found), indent=2),
    }
    for best in list(chosen.values())[:1]:
        files["arguments.txt"] = f"{shlex.join(flags(best, tuning.run, tuning.settings))}\n"
    for name, text in files.items():
        storage.write_atomic(storage.join(out, name), text.encode())
    say(f"{out}/index.html, tune.json and arguments.txt written", error=True)
