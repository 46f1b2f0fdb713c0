"""Verbs that look after a store: check it, clean it, adopt into it, free it."""

from __future__ import annotations

import runpy
import sys

from pipeline.cli import options
from pipeline.cli.context import Context, say
from pipeline.errors import InputError, PonenteError
from pipeline.execute import adopt as adoption
from pipeline.graph.node import Node, topological
from pipeline.pages.readable import duration
from pipeline.plan.state import look
from pipeline.store import integrity, lease
from pipeline.store.garbage import Garbage, Keep, delete, find_garbage
from pipeline.store.manifest import Manifest, load


def verify(context: Context) -> int:
    """Digest outputs again, byte by byte; status 1 if something is not what was written."""
    damaged = checked = size = 0
    for node in context.steps():
        path = context.store.path(node)
        try:
            manifest = load(path)
            problems = list(integrity.damage(path, manifest)) if manifest else []
        except (PonenteError, OSError) as error:
            manifest, problems = None, [" ".join(str(error).split())]
        if manifest is None and not problems:
            say(f"{node.label:<16} nothing published")
            continue
        checked, damaged = checked + 1, damaged + bool(problems)
        size += manifest.size if manifest else 0
        state = "corrupt" if problems else "sound"
        say(f"{node.label:<16} {state}{f', {_contents(manifest)}' if manifest else ''}")
        for problem in problems:
            say(f"  {problem}")
        if problems:
            say(f"  build it again with --force {node.label}")
    say(f"{checked} outputs, {size:,} bytes read, {damaged} corrupt")
    return 1 if damaged else 0


def _contents(manifest: Manifest) -> str:
    files = sum(len(shard.files) for shard in manifest.shards)
    if not files:
        return "0 files; result in the manifest"
    return f"{files:,} files, {manifest.size:,} bytes"


def gc(context: Context) -> int:
    """List what no preset and no recorded run needs; delete it with --delete."""
    o = context.options
    nodes = topological([*context.all_targets(), *_other_experiments(context.words)])
    keep = Keep(not o.presets_only, o.older_than, o.keep)
    report = find_garbage(context.store, nodes, keep)
    for line in report.left:
        say(f"left: {line}")
    for item in report.garbage:
        say(_garbage_line(item))
    total = sum(item.size for item in report.garbage)
    objects = f"{len(report.garbage)} objects ({total:,} bytes)"
    if not o.delete or not report.garbage:
        say(f"{objects} can be deleted{'; pass --delete' if report.garbage else ''}")
        return 0
    confirm(context, f"delete {objects} from {context.store.prefix}")
    freed, left = delete(context.store, report.garbage, wait=lease.STALE_SECONDS + 1)
    for line in left:
        say(f"left: {line}")
    say(f"{freed:,} bytes deleted")
    return 0


def _garbage_line(item: Garbage) -> str:
    age = "?" if item.age is None else duration(item.age)
    cost = "" if item.cost is None else f", took {duration(item.cost)} to build"
    return f"{item.size:>16,}  {item.url}  ({item.why}; {age} old{cost})"


def _other_experiments(files: list[str]) -> list[Node]:
    """Targets of every preset of other experiment files."""
    options.collected = []
    try:
        for file in files:
            before = len(options.collected)
            runpy.run_path(file, run_name="__main__")
            if len(options.collected) == before:
                raise InputError(f"{file}: expected an experiment that calls main(...)")
        return options.collected
    finally:
        options.collected = None


def adopt(context: Context) -> int:
    """Publish an existing output under a step's key, recorded as adopted; --undo removes it."""
    node, store = context.step(), context.store
    if context.options.undo:
        say(f"{node.label}: no longer adopted; files stay in {adoption.undo(store, node)}")
        return 0
    seen = look(topological([node]), store)
    source = adoption.choose(store, node, seen, context.options.source)
    say(f"{node.label}: {source.path}")
    for line in source.differences:
        say(f"  ignored difference: {line}")
    if not context.options.source:
        confirm(context, f"adopt {source.path} as {node.label}")
    found = adoption.adopt(store, node, seen, source)
    say(f"{node.label}: adopted {found.origin}; undo with adopt {node.label} --undo")
    return 0


def unlock(context: Context) -> int:
    """End the lease on a step, whoever holds it."""
    node = context.step()
    owner = lease.end(context.store.path(node))
    say(f"{node.label}: {f'released, was held by {owner}' if owner else 'the lease is free'}")
    return 0


def confirm(context: Context, question: str) -> None:
    """Ask on a terminal. Raises `InputError` when the answer is no, or there is no terminal."""
    if context.options.yes:
        return
    if not sys.stdin.isatty():
        raise InputError(f"{question}? pass --yes to confirm, as there is no terminal to ask on")
    if input(f"{question}? [y/N] ").strip().lower() not in ("y", "yes"):
        raise InputError("not confirmed; nothing was changed")


def doctor(context: Context) -> int:
    """Check what runs depend on: Python, packages, devices, store, clock, Ray, hub."""
    from pipeline.doctor import examine, main_lines

    lines, status = main_lines(examine(context.store.prefix))
    for line in lines:
        say(line)
    return status
