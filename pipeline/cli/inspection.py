"""Verbs that look and say: they write nothing to the store."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from pipeline.cli.context import Context, say
from pipeline.errors import InputError
from pipeline.graph.node import Node, topological, unique_labels
from pipeline.plan.explain import explain as explained
from pipeline.plan.lineage import lineage, users
from pipeline.plan.plan import Planned
from pipeline.plan.plan import plan as planned
from pipeline.plan.state import pick, resolve
from pipeline.store import storage


def _entries(context: Context) -> list[Planned]:
    targets = resolve(context.targets, context.choice)
    order = topological(targets)
    forced = {node.key for name in context.options.force for node in pick(order, name)}
    return planned(targets, context.store, frozenset(forced))


def _entry(context: Context, node: Node) -> Planned:
    return next(e for e in planned([node], context.store) if e.node.key == node.key)


def plan(context: Context) -> int:
    """What a run would do, step by step, and why."""
    entries = _entries(context)
    labels = unique_labels([entry.node for entry in entries])
    width = max(len(label) for label in labels.values()) + 1
    say(f"store {context.store.prefix}")
    for entry in entries:
        action = "run" if entry.needed else "reuse" if entry.reused else "skip"
        beside = f" (follows {', '.join(entry.beside)} while it runs)" if entry.beside else ""
        label = f"{labels[entry.node.key]:<{width}}"
        say(f"{action:<6} {label} {entry.status:<8} {entry.reason}{beside}")
    warnings = [warning for entry in entries for warning in entry.warnings]
    for warning in warnings:
        say(f"warning: {warning}")
    for note in (note for entry in entries for note in entry.notes):
        say(f"warning: {note}")
    for entry in entries:
        for advice in entry.node.advice():
            say(f"warning: {labels[entry.node.key]}: {advice}")
    say(f"{sum(e.needed for e in entries)} of {len(entries)} steps would run")
    if warnings and context.options.strict:
        raise InputError("--strict: outputs were built by other code; see the warnings")
    return 0


def explain(context: Context) -> int:
    """Why a step would run or not: key, nearest earlier output, differences, consequences."""
    entries = _entries(context)
    chosen = {node.key for node in context.steps()}
    for entry in entries:
        if entry.node.key in chosen:
            for line in explained(entries, entry, context.store):
                say(line)
    return 0


def graph(context: Context) -> int:
    """Steps, inputs and directories; with --html a page of the graph as it stands in the store."""
    if context.options.html:
        return _graph_page(context)
    for node in topological(context.targets):
        inputs = ", ".join(
            f"{name}={child.label}{' (live)' if name in node.live else ''}"
            for name, child in node.inputs.items()
        )
        say(f"{node.label}({inputs}) -> {node.output.__name__}  {context.store.path(node)}")
    return 0


def _graph_page(context: Context) -> int:
    from pipeline.pages.page import render
    from pipeline.pages.record import RunRecord, StepRecord

    states = {"running": "running", "failed": "failed", "damaged": "failed"}
    now = time.time()
    prefix, command = context.store.prefix, sys.argv
    record = RunRecord("plan", prefix, command, started=now, ended=now, last=now, outcome="plan")
    manifests = {}
    for entry in _entries(context):
        node = entry.node
        step = StepRecord(node.label, node.key, node.step.name, node.directory)
        step.inputs = {name: child.key for name, child in node.inputs.items()}
        step.config, step.reason = node.identity.config, entry.reason
        step.state = states.get(entry.status, "planned")
        if entry.found is not None:
            manifests[node.key] = entry.found.manifest
            step.origin = entry.found.origin or ""
            step.state = "elsewhere" if step.origin else "reused"
            step.seconds = entry.found.manifest.seconds
        record.steps[node.key] = step
    page = render(record, manifests, [])
    storage.write_atomic(context.options.html, page.encode())
    say(f"wrote {context.options.html}")
    return 0


def status(context: Context) -> int:
    """How far the steps are, and what the newest runs in this store did."""
    from pipeline.pages.record import STATES, read, runs

    entries = _entries(context)
    labels = unique_labels([entry.node for entry in entries])
    recent = runs(context.store.prefix)
    latest = read(context.store.prefix, recent[0].run) if recent else None
    for entry in entries:
        step = latest.steps.get(entry.node.key) if latest is not None else None
        said = f"; last run: {STATES[step.state]}" if step is not None else ""
        if step is not None and step.state == "running" and step.progress:
            said += f", {step.progress}"
        label = labels[entry.node.key]
        say(f"{label:<16} {entry.status:<8} {entry.detail or entry.reason}{said}")
    for summary in recent[:5]:
        say(f"run {summary.run}: {summary.ending}, {' '.join(summary.command)}")
    return 0


def show(context: Context) -> int:
    """One step's output: what it is, what it was made from, what was made from it."""
    entry = _entry(context, context.step())
    if entry.found is None:
        raise InputError(f"{entry.node.label}: nothing published at {entry.path} ({entry.status})")
    path, manifest = entry.found.path, entry.found.manifest
    tree = json.loads(manifest.to_bytes())
    if context.options.json:
        say(json.dumps({"path": path, **tree}, indent=1))
        return 0
    built = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.started))
    say(f"{manifest.label}  {path}")
    say(f"  step        {manifest.step}, version {manifest.version}")
    say(f"  key         {manifest.key}")
    say(f"  content     {manifest.content}")
    say(f"  built       {built}, {manifest.seconds:.1f} s, attempt {manifest.attempt}")
    say(f"  size        {manifest.size:,} bytes in {len(manifest.shards)} shards")
    if entry.found.origin:
        kind = manifest.origin.kind if manifest.origin else "shared store"
        say(f"  files are   {entry.found.origin} ({kind})")
    _section("source", {name: str(summary) for name, summary in manifest.sources.items()})
    for line in manifest.origin.differences if manifest.origin else ():
        say(f"  ignoring    {line}")
    _section("config", _configuration(entry.node))
    _section("result", {k: v for k, v in manifest.result.items() if k != "headline"})
    up = [a for a in lineage([path]) if a.path != path]
    _section("made from", {a.manifest.label: a.path for a in up})
    down = users(context.store.prefix, context.store.outputs(), path)
    _section("used by", {name: "" for name in down})
    _section("environment", manifest.provenance)
    return 0


def _configuration(node: Node) -> dict[str, Any]:
    return {**node.config, **node.runtime}


def _section(title: str, values: dict[str, Any]) -> None:
    for name, value in values.items():
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        text = text if len(text) <= 400 else f"{text[:397]}..."
        say(f"  {title:<11} {name}{' = ' if text else ''}{text}")
        title = ""
