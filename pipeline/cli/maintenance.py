"""Verbs that look after a store: check it, clean it, adopt into it, free it."""

from __future__ import annotations

import dataclasses
from typing import Any

from pipeline.cli.context import Context, say
from pipeline.cli.inspection import say_json
from pipeline.execute import adopt as adoption
from pipeline.graph.declaration import load as load_experiment
from pipeline.graph.node import Node, topological
from pipeline.plan.state import look
from pipeline.store import integrity, lease
from pipeline.store.garbage import delete, find_garbage
from pipeline.store.manifest import Manifest, load


def verify(context: Context) -> int:
    """Digest outputs again, byte by byte; status 1 if something is not what was written."""
    found: list[dict[str, Any]] = []
    for node in context.steps():
        path = context.store.path(node)
        manifest = load(path)
        problems = [] if manifest is None else list(integrity.damage(path, manifest))
        state = "missing" if manifest is None else "corrupt" if problems else "sound"
        size = manifest.size if manifest is not None else 0
        found.append(
            {"label": node.label, "path": path, "state": state, "bytes": size, "problems": problems}
        )
        if not context.options.json:
            _say_verified(node.label, state, manifest, problems)
    corrupt = sum(each["state"] == "corrupt" for each in found)
    if context.options.json:
        say_json({"store": context.store.prefix, "outputs": found, "corrupt": corrupt})
    else:
        checked = [each["bytes"] for each in found if each["state"] != "missing"]
        say(f"{len(checked)} outputs, {sum(checked):,} bytes read, {corrupt} corrupt")
    return 1 if corrupt else 0


def _say_verified(label: str, state: str, manifest: Manifest | None, problems: list[str]) -> None:
    if manifest is None:
        say(f"{label:<16} nothing published")
        return
    held = f"{manifest.size:,} bytes" if manifest.shards else "its result is in the manifest"
    say(f"{label:<16} {state.upper() if problems else state}, {held}")
    for problem in problems:
        say(f"  {problem}")
    if problems:
        say(f"  build it again with --force {label}")


def gc(context: Context) -> int:
    """List what no named experiment reaches; delete it with --delete."""
    nodes = topological([*context.all_targets(), *_other_experiments(context.words)])
    garbage = find_garbage(context.store, nodes)
    total = sum(item.size for item in garbage)
    freed = delete(context.store, garbage) if context.options.delete else 0
    if context.options.json:
        items = [{"url": item.url, "bytes": item.size, "reason": item.why} for item in garbage]
        say_json({"store": context.store.prefix, "objects": items, "bytes": total, "freed": freed})
        return 0
    for item in garbage:
        say(f"{item.size:>16,}  {item.url}  ({item.why})")
    if context.options.delete:
        say(f"{len(garbage)} objects, {freed:,} bytes deleted")
    else:
        say(f"{len(garbage)} objects ({total:,} bytes) can be deleted; pass --delete")
    return 0


def _other_experiments(files: list[str]) -> list[Node]:
    """Targets of every preset of other experiment files."""
    others = [load_experiment(file) for file in files]
    return [node for e in others for preset in e.presets for node in e.graph(preset)]


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

    findings = examine(context.store.prefix)
    lines, status = main_lines(findings)
    if context.options.json:
        say_json({"findings": [dataclasses.asdict(finding) for finding in findings]})
        return status
    for line in lines:
        say(line)
    return status
