"""Verbs that read the store and write nothing to it."""

from __future__ import annotations

import importlib
import itertools
import json
import shlex
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from pipeline.cli.context import Context, say, step_command
from pipeline.errors import InputError, UsageError
from pipeline.execute.run_record import STATES, RunRecord, StepRecord
from pipeline.execute.spending import Spending, hardware_name
from pipeline.graph.facts import Facts, Published
from pipeline.graph.order import topological, unique_labels
from pipeline.graph.step import Node
from pipeline.identity.fingerprint import plain, plain_identity
from pipeline.pages.readable import command_line
from pipeline.plan import facts as step_facts
from pipeline.plan.lineage import lineage, users
from pipeline.plan.plan import FEW, Planned, explain
from pipeline.plan.plan import plan as planned
from pipeline.plan.state import CORRUPT, FOREIGN, missing_inputs, pick, resolve
from pipeline.store import storage


def entries(context: Context) -> list[Planned]:
    """The plan of the steps that the flags select, inputs first."""
    targets = resolve(context.targets, context.choice)
    order = topological(targets)
    forced = {node.key for name in context.choice.force for node in pick(order, name)}
    only = frozenset(node.key for name in context.choice.only for node in pick(order, name))
    keep = context.choice.keep_shards
    return planned(targets, context.store, frozenset(forced), keep_shards=keep, only=only)


def say_json(tree: Mapping[str, Any]) -> None:
    """Print one JSON object; "format" is incremented when a field changes its meaning."""
    say(json.dumps({"format": 1, **tree}, indent=1, allow_nan=False))


def _action(entry: Planned) -> str:
    if entry.refused or entry.left_out:
        return "refuse"
    return "run" if entry.needed else "reuse" if entry.reused else "skip"


def _plain(entry: Planned, label: str) -> dict[str, Any]:
    node = entry.node
    return {
        "label": label,
        "action": _action(entry),
        "status": entry.status,
        "reason": entry.reason,
        "progress": entry.detail,
        "changes": entry.lines,
        "nearest": entry.nearest,
        "warnings": [*entry.warnings, *entry.notes, *node.advice()],
        "step": node.step.name,
        "key": node.key,
        "path": entry.path,
        "inputs": {name: child.key for name, child in node.inputs.items()},
        "config": {name: plain_identity(value) for name, value in node.config.items()},
    }


def recorded(node: Node) -> dict[str, Any]:
    return {
        "label": node.label,
        "key": node.key,
        "step": node.step.name,
        "directory": node.directory,
        "config": node.identity.config,
        "inputs": {name: child.key for name, child in node.inputs.items()},
        "hardware": hardware_name(node),
    }


def plan(context: Context) -> int:
    """Print what a run would do with each step, and why; of named steps every reason.

    --html writes a page with the graph and the states of its steps in the store. See --on, too.
    """
    if context.options.on:
        return _elsewhere(context)
    if context.options.batches or context.options.compile:
        raise UsageError("plan: --batches and --compile need --on")
    found = entries(context)
    labels = unique_labels([entry.node for entry in found])
    named = {node.key for node in context.steps()} if context.words else set()
    shown = [entry for entry in found if entry.node.key in named or not named]
    reasons = {e.node.key: list(explain(found, e, context.store)) for e in shown if named}
    there = {e.node.key: e.found for e in found if e.found is not None}
    learning = not context.options.no_learning
    outputs = Published(there, context.store.prefix, context.capacity, learning=learning)
    stated = step_facts.state([entry.node for entry in shown if entry.needed], outputs)
    if context.options.budget:
        record = RunRecord("plan", started=time.time(), spot=context.capacity.spot)

        def predict(node: Node) -> float | None:
            return stated[node.key].seconds() if node.key in stated else None

        limit = Spending(context.options.budget, record, predict, spot=record.spot)
        limit.check_prices(entry.node for entry in found)
        for node in [entry.node for entry in shown if entry.needed]:
            if why := limit.refusal(node):
                stated[node.key] = step_facts.merge(
                    stated.get(node.key, Facts()), Facts(refusal=why)
                )
    if context.options.html:
        _write_page(context, found, stated)
    elif context.options.json:
        if not context.options.no_compile:
            more = step_facts.examine(stated, labels, lambda _: None)
            stated |= {key: step_facts.merge(stated[key], facts) for key, facts in more.items()}
        steps = []
        for entry in shown:
            step = _plain(entry, labels[key := entry.node.key])
            if facts := stated.get(key):
                step["facts"] = {**facts.data, "lines": facts.lines, "refusal": facts.refusal}
            steps.append(step | ({"explanation": reasons[key]} if named else {}))
        say_json({"store": context.store.prefix, "preset": context.preset, "steps": steps})
    else:
        for line in (line for lines in reasons.values() for line in lines):
            say(line)
        if not named:
            _say_plan(context, found, labels)
        say_facts(stated, labels)
        if not context.options.no_compile:
            say_facts(step_facts.examine(stated, labels, say), labels)
    _check_code(context, found)
    return 0


def _check_code(context: Context, found: list[Planned]) -> None:
    warnings = [warning for entry in found for warning in entry.warnings]
    if context.options.strict and warnings:
        raise InputError(f"--strict: outputs were built by other code: {'; '.join(warnings)}")


def _elsewhere(context: Context) -> int:
    """`plan --on`: the comparison of the first of the named steps that has one."""
    found = entries(context)
    _check_code(context, found)
    able = [node for node in context.steps() if node.step.elsewhere]
    if not able:
        steps = ", ".join(node.label for node in context.steps())
        raise InputError(f"plan --on: expected a step that trains, found {steps}")
    module, _, name = able[0].step.elsewhere.partition(":")
    there = {e.node.key: e.found for e in found if e.found is not None}
    outputs = Published(there, context.store.prefix)
    return getattr(importlib.import_module(module), name)(context, able[0], outputs)


def say_facts(stated: Mapping[str, Facts], labels: Mapping[str, str]) -> None:
    """Print each step's facts, and why a run would refuse it."""
    for key, facts in stated.items():
        if facts.lines:
            say(f"{labels[key]}:")
        for line in facts.lines:
            say(f"  {line}")
        for line in facts.refusal.splitlines():
            say(f"run would refuse {labels[key]}: {line}")


def _say_plan(context: Context, found: list[Planned], labels: dict[str, str]) -> None:
    width = max(len(label) for label in labels.values()) + 1
    say(f"store {context.store.prefix}")
    for entry in found:
        live = f" (follows {', '.join(entry.beside)} while it runs)" if entry.beside else ""
        label = f"{labels[entry.node.key]:<{width}}"
        reason = entry.reason
        if len(entry.lines) > FEW:
            reason += f" ({step_command(context, labels[entry.node.key])})"
        say(f"{_action(entry):<6} {label} {entry.status:<8} {reason}{live}")
    for entry in found:
        for warning in (*entry.warnings, *entry.notes):
            say(f"warning: {warning}")
        for advice in entry.node.advice():
            say(f"warning: {labels[entry.node.key]}: {advice}")
    if missing := [labels[entry.node.key] for entry in found if entry.left_out]:
        say(f"run would refuse: {missing_inputs(context.choice.only, missing)}")
    elif refused := [entry for entry in found if entry.refused]:
        names = ",".join(labels[entry.node.key] for entry in refused)
        kinds = " and ".join(sorted({entry.status for entry in refused}))
        again = f"build them again with --force {shlex.quote(names)}"
        say(f"run would refuse: {kinds} outputs of {names}; {again}")
    else:
        say(f"{sum(e.needed for e in found)} of {len(found)} steps would run")


def _write_page(context: Context, found: list[Planned], stated: Mapping[str, Facts]) -> None:
    from pipeline.pages.page import render

    states = {"running": "running", **dict.fromkeys(("failed", CORRUPT, FOREIGN), "failed")}
    now = time.time()
    prefix, command = context.store.prefix, context.command
    record = RunRecord("plan", prefix, command, started=now, ended=now, last=now, outcome="plan")
    record.experiment = context.experiment.name if context.experiment is not None else ""
    manifests = {}
    for entry in found:
        node = entry.node
        state = states.get(entry.status, "planned")
        step = StepRecord(**recorded(node), state=state, reason=entry.reason)
        if entry.found is not None:
            manifests[node.key] = entry.found.manifest
            step.origin = entry.found.elsewhere or ""
            step.state = "elsewhere" if step.origin else "reused"
            step.seconds = entry.found.manifest.seconds
        if facts := stated.get(node.key):
            refused = [f"run would refuse it: {line}" for line in facts.refusal.splitlines()]
            step.facts = [*facts.lines, *refused]
        record.steps[node.key] = step
    page = render(record, manifests)
    storage.write_atomic(context.options.html, page.encode())
    say(f"wrote {context.options.html}")


def status(context: Context) -> int:
    """Print the progress of the steps, and the outcome of the newest runs in this store."""
    if context.options.watch:
        from pipeline.cli.watch import watch

        return watch(context)
    from pipeline.cli.watch import is_run_of, state_of
    from pipeline.pages.record import every, read

    found = entries(context)
    labels = unique_labels([entry.node for entry in found])
    chosen = {node.key for node in context.steps()} if context.words else None
    records = every(context.store.prefix)
    recent = list(itertools.islice(records, 5))
    assert context.experiment is not None
    newest = (r for r in itertools.chain(recent, records) if is_run_of(r, context.experiment))
    mine = next(newest, None)
    latest = read(context.store.prefix, mine.run) if mine is not None else None
    steps = []
    for entry in found:
        if chosen is not None and entry.node.key not in chosen:
            continue
        step = latest.steps.get(entry.node.key) if latest is not None else None
        state = state_of(step, latest) if step is not None and latest is not None else ""
        progress = step.progress if step is not None else ""
        running = f", {progress}" if state == STATES["running"] and progress else ""
        plain = _plain(entry, labels[entry.node.key])
        steps.append({**plain, "last_run": state, "last_progress": progress})
        if not context.options.json:
            last = f"; last run: {state}{running}" if state else ""
            detail = entry.detail or entry.reason
            say(f"{labels[entry.node.key]:<16} {entry.status:<8} {detail}{last}")
    if context.options.json:
        shown = [
            {"run": r.run, "state": r.ending, "outcome": r.outcome or None, "command": r.command}
            for r in recent
        ]
        say_json({"store": context.store.prefix, "steps": steps, "runs": shown})
    else:
        for summary in recent:
            say(f"run {summary.run}: {summary.ending}, {command_line(summary.command)}")
    return 0


def show(context: Context) -> int:
    """Print one step's output: its manifest, its inputs and the outputs that use it."""
    node = context.step()
    entry = next(e for e in planned([node], context.store) if e.node.key == node.key)
    unused = entry.status in ("stale", FOREIGN)  # published, and yet a run would not reuse it
    found = context.store.find(node) if unused else entry.found
    if found is None:
        reason = entry.reason if entry.status == CORRUPT else f"nothing published at {entry.path}"
        raise InputError(f"{entry.node.label}: {reason} ({entry.status})")
    path, manifest = found.path, found.manifest
    up = [a for a in lineage([path]) if a.path != path]
    down = users(context.store.prefix, context.store.outputs(), path)
    if context.options.json:
        shards = tuple(manifest.shards)  # also those in a table
        tree = json.loads(msgspec.structs.replace(manifest, shards=shards).to_bytes())
        tree["config"] = plain(tree["config"])
        made_from = {a.manifest.label: a.path for a in up}
        state = {"state": entry.status, "reason": entry.reason} if unused else {}
        say_json({"path": path, **tree, **state, "made_from": made_from, "used_by": list(down)})
        return 0
    built = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.started))
    say(f"{manifest.label}  {path}")
    if unused:
        say(f"  state       {entry.status}: {entry.reason}")
    say(f"  step        {manifest.step}, version {manifest.version}")
    say(f"  key         {manifest.key}")
    say(f"  content     {manifest.content}")
    say(f"  built       {built}, {manifest.seconds:.1f} s, attempt {manifest.attempt}")
    say(f"  size        {manifest.size:,} bytes in {len(manifest.shards)} shards")
    if found.elsewhere:
        kind = manifest.alias.kind if manifest.alias else "shared store"
        say(f"  files are   {found.elsewhere} ({kind})")
    _section("source", {name: str(summary) for name, summary in manifest.sources.items()})
    for line in manifest.alias.differences if manifest.alias else ():
        say(f"  ignoring    {line}")
    config = {name: plain_identity(value) for name, value in entry.node.config.items()}
    _section("config", {**config, **entry.node.runtime})
    _section("result", {k: v for k, v in manifest.result.items() if k != "headline"})
    _section("made from", {a.manifest.label: a.path for a in up})
    _section("used by", {name: "" for name in down})
    _section("environment", manifest.provenance)
    return 0


def _section(title: str, values: dict[str, Any]) -> None:
    for name, value in values.items():
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        text = text if len(text) <= 400 else f"{text[:397]}..."
        say(f"  {title:<11} {name}{' = ' if text else ''}{text}")
        title = ""
