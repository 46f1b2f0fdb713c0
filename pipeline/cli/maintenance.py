"""Verbs that look after a store: check it, clean it, adopt into it, free it."""

from __future__ import annotations

import runpy

from pipeline.cli import options
from pipeline.cli.context import Context, say
from pipeline.errors import InputError
from pipeline.execute import adopt as adoption
from pipeline.graph.node import Node, topological
from pipeline.plan.state import look
from pipeline.store import integrity, lease
from pipeline.store.garbage import delete, find_garbage
from pipeline.store.manifest import load


def verify(context: Context) -> int:
    """Digest outputs again, byte by byte; status 1 if something is not what was written."""
    damaged = checked = size = 0
    for node in context.steps():
        path = context.store.path(node)
        manifest = load(path)
        if manifest is None:
            say(f"{node.label:<16} nothing published")
            continue
        problems = list(integrity.damage(path, manifest))
        checked, size, damaged = checked + 1, size + manifest.size, damaged + bool(problems)
        say(f"{node.label:<16} {'DAMAGED' if problems else 'sound'}, {manifest.size:,} bytes")
        for problem in problems:
            say(f"  {problem}")
        if problems:
            say(f"  build it again with --force {node.label}")
    say(f"{checked} outputs, {size:,} bytes read, {damaged} damaged")
    return 1 if damaged else 0


def gc(context: Context) -> int:
    """List what no named experiment reaches; delete it with --delete."""
    nodes = topological([*context.all_targets(), *_other_experiments(context.words)])
    garbage = find_garbage(context.store, nodes)
    for item in garbage:
        say(f"{item.size:>16,}  {item.url}  ({item.why})")
    total = sum(item.size for item in garbage)
    if not context.options.delete:
        say(f"{len(garbage)} things, {total:,} bytes could go; say --delete to delete them")
        return 0
    say(f"{len(garbage)} things, {delete(context.store, garbage):,} bytes deleted")
    return 0


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
    """Publish an existing output under a step's key, recorded as adopted."""
    node = context.step()
    seen = look(topological([node]), context.store)
    found, passed_over = adoption.adopt(context.store, node, seen, context.options.source)
    say(f"{node.label}: adopted {found.origin}")
    for line in passed_over:
        say(f"  passed over: {line}")
    return 0


def unlock(context: Context) -> int:
    """End the lease on a step, whoever holds it."""
    node = context.step()
    owner = lease.end(context.store.path(node))
    say(f"{node.label}: {'released, was ' + lease.words(owner) if owner else 'nobody holds it'}")
    return 0


def doctor(context: Context) -> int:
    """Check what runs depend on: Python, packages, devices, store, clock, Ray, hub."""
    from pipeline.doctor import examine, main_lines

    lines, status = main_lines(examine(context.store.prefix))
    for line in lines:
        say(line)
    return status
