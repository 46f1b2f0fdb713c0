"""`plan --on`: the layouts of one name of hardware, or the best layout of each of several.

By formula: no device is needed, and nothing is compiled unless that is asked for.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from functools import partial

from pipeline import Hardware, InputError, pod
from pipeline.accelerators import GPUS, TPUS, Chip, Tpu
from pipeline.cli.context import Context, file_among, given, say
from pipeline.cli.inspection import say_json
from pipeline.graph.facts import Results
from pipeline.graph.step import Node
from pipeline.store import storage
from steps.platforms import chip_of
from steps.training.plan import experience
from steps.training.plan.declared_run import declared_run
from steps.training.plan.experience import measured_on
from steps.tuning.search import CHANGES, compile_fastest, fastest, search
from steps.tuning.table import Table, row

ALL, SAME = "all", "the same model and batch"


def compare(context: Context, node: Node, results: Results) -> int:
    """Print the table of a step that trains, or write its page; returns the exit status 0."""
    run, options, command = declared_run(node, results), context.options, context.command
    if run is None:
        raise InputError(f"plan --on: {node.label} has a length when its inputs are built")
    kinds: dict[str, Chip] = {**TPUS, **GPUS}
    names = [each for name in options.on for each in (kinds if name == ALL else (name,))]
    names = [like(kinds[n], run.hardware) if n in kinds else n for n in names]
    pods = [pod(name) for name in dict.fromkeys(names)]
    if without := [each.name for each in pods if chip_of(each) is None]:
        raise InputError(
            f"plan --on: {without[0]}: expected chips whose time is predicted, such as v6e-8, "
            f"2xv5e-16, 8xh100, v7x or {ALL}"
        )
    if len(pods) > 1 and (options.batches or options.compile):
        raise InputError(f"plan --on: --batches and --compile need one name, found {len(pods)}")
    at = command.index("plan")
    file = [*file_among(command[at:]), *file_among(command)][0]  # or python FILE plan
    words = (file, *given(context))
    store = "" if options.no_learning else context.store.prefix
    chips = dict.fromkeys(each.generation for each in pods)
    said = {chip: measured_on(experience.Hardware.of(chip), store) for chip in chips}
    made = Table(label=node.label, run=run, settings=context.settings, words=words, said=said)
    made = _of_each(made, pods) if len(pods) > 1 else _layouts(made, pods[0], context)
    if options.json:
        say_json(made.data())
    else:
        say("\n".join(made.lines()))
    if options.html:
        storage.write_atomic(options.html, made.page().encode())
        say(f"wrote {options.html}", error=True)
    return 0


def _of_each(table: Table, pods: list[Hardware]) -> Table:
    """The fastest layout of each, with the cheapest on demand and the fastest chosen."""
    runs = [dataclasses.replace(table.run, hardware=hardware) for hardware in pods]
    rows = [row(run, fastest(run, table.said[run.hardware.generation])) for run in runs]
    fitting = [each for each in rows if each.fits]
    priced = [each for each in fitting if each.cost is not None]
    chosen = {"cheapest": min(priced, key=lambda each: each.cost or 0.0)} if priced else {}
    chosen |= {"fastest": min(fitting, key=lambda each: each.time)} if fitting else {}
    return dataclasses.replace(table, sections={SAME: rows}, chosen=chosen)


def _layouts(table: Table, hardware: Hardware, context: Context) -> Table:
    """The declared layout on one hardware, and the front of each kind of change to it."""
    compiles, show = context.options.compile, partial(say, error=True)
    if compiles and (hardware.kind != "tpu" or importlib.util.find_spec("libtpu") is None):
        found = f"found {hardware.name}; and libtpu, which `make` installs"
        raise InputError(f"plan --compile: expected a TPU slice in --on, {found}")
    run = dataclasses.replace(table.run, hardware=hardware)
    batches, said = context.options.batches or (), table.said[hardware.generation]
    found = search(run, batches, uncertain=bool(compiles), said=said)
    found = compile_fastest(found, run, compiles, show)
    rows = {id(plan): row(run, plan) for plan in found.plans}
    sections = {"as declared": [row(run, found.declared)]}
    for kind, meaning in CHANGES.items():
        if plans := found.front(kind):
            sections[meaning] = [rows[id(plan)] for plan in plans]
    chosen = {f"fastest, {CHANGES[kind]}": rows[id(p)] for kind, p in found.chosen().items()}
    tried = f"{found.tried:,} layouts, {found.fitting:,} plans fit by formula"
    return dataclasses.replace(table, sections=sections, chosen=chosen, tried=tried)


def like(chip: Chip, hardware: Hardware) -> str:
    """The name of as many chips of one kind as `hardware` has, or of the fewest above that.

    TPUs in as many slices, or in more where one cannot be so large; one chip for "local".
    """
    wanted = max(1, hardware.chips)
    if not isinstance(chip, Tpu):
        hosts = math.ceil(wanted / 8)
        return f"{hosts}x8x{chip.name}" if hosts > 1 else f"{wanted}x{chip.name}"
    sizes = {size: name for name, size in chip.names.items()}
    slices = max(hardware.slices, math.ceil(wanted / max(sizes)))
    size = min(size for size in sizes if size * slices >= wanted)
    return f"{slices}x{sizes[size]}" if slices > 1 else sizes[size]
