"""The panel of one step on a run's page: all that is known about it, as HTML."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from pipeline.identity.fingerprint import plain
from pipeline.pages import readable
from pipeline.pages.drawing import anchor
from pipeline.pages.record import DONE, STATES, RunRecord, RunSummary, StepRecord
from pipeline.store.manifest import Manifest

_MOST_LINKS = 12


@dataclass(frozen=True)
class Context:
    """What a panel needs beside its step.

    Attributes:
        record: the run.
        users: key -> keys of the steps made from it.
        touched: key -> [(other run, "executed" | "reused" | "failed")], newest first.
    """

    record: RunRecord
    users: Mapping[str, list[str]]
    touched: Mapping[str, list[tuple[RunSummary, str]]]


def context(record: RunRecord, others: Iterable[RunSummary]) -> Context:
    """Index the run's graph by user, and the other runs by key."""
    users: dict[str, list[str]] = {key: [] for key in record.steps}
    for key, step in record.steps.items():
        for parent in dict.fromkeys(step.inputs.values()):
            if parent in users:
                users[parent].append(key)
    touched: dict[str, list[tuple[RunSummary, str]]] = {}
    for other in others:
        if other.run != record.run:
            for how in ("executed", "reused", "failed"):
                for key in getattr(other, how) & record.steps.keys():
                    touched.setdefault(key, []).append((other, how))
    return Context(record, users, touched)


def panel(step: StepRecord, manifest: Manifest | None, context: Context) -> str:
    """One step's panel, hidden by the style sheet until the page's address names it."""
    label = html.escape(step.label)
    done = manifest if step.state in DONE else None
    sections = [
        _facts(step, manifest, context.record),
        _pairs("Result", readable.flat(_result(step, done))),
        _links("Inputs", _inputs(step, context)),
        _links("Used by", [_step_link(context, key) for key in context.users[step.key]]),
        _links("Other runs", [_run_link(*pair) for pair in context.touched.get(step.key, ())]),
        _configuration(step, manifest),
        _provenance(done),
    ]
    return (
        f'<aside class="panel" id="step={html.escape(step.key)}" tabindex="-1" '
        f'aria-label="{label}"><a class="close" href="#" aria-label="close">&#215;</a>'
        f'<h3>{label}</h3><p><span class="pill {step.state}">{STATES[step.state]}</span> '
        f"{html.escape(explanation(step, manifest))}</p>{''.join(sections)}</aside>"
    )


def explanation(step: StepRecord, manifest: Manifest | None) -> str:
    """Why the step is in its state, in one sentence or none."""
    built = f" on {readable.moment(manifest.started)}" if manifest is not None else ""
    took = f" in {readable.duration(step.seconds)}" if step.seconds is not None else ""
    if step.cause and step.state != "executed":
        return step.cause
    if step.state == "reused":
        return step.reason or f"built{built}{took}"
    if step.state == "elsewhere":
        return f"built{built}{took}; came from {step.origin}"
    if step.state == "executed":
        return f"ran{took}" + (f"; {step.reason}" if step.reason else "")
    if step.state == "unreached":
        return "the run ended before its turn"
    if step.state == "unneeded":
        return "the steps that use it were there already"
    return step.reason or step.progress


def log_link(log: str, record: RunRecord) -> str:
    """A log's place; a link relative to the page where the log is in the same store."""
    text = html.escape(log)
    base = record.store.rstrip("/") + "/"
    if not record.store or not log.startswith(base):
        return f"<code>{text}</code>"
    inside = quote("../" + log.removeprefix(base))
    return f'<a href="{html.escape(inside)}"><code>{text}</code></a>'


def _facts(step: StepRecord, manifest: Manifest | None, record: RunRecord) -> str:
    facts = [("Key", f"<code>{html.escape(step.key)}</code>")]
    if step.directory:
        place = html.escape(step.directory)
        facts.append(
            ("Directory", f'<a href="../{quote(step.directory)}/"><code>{place}</code></a>')
        )
    if step.origin:
        facts.append(("Origin", f"<code>{html.escape(step.origin)}</code>"))
    for attempt in step.attempts:
        took = f", {readable.duration(attempt.ended - attempt.started)}" if attempt.ended else ""
        cause = f"; {attempt.cause}" if attempt.cause else ""
        name = html.escape(f"{attempt.name or 'attempt'}: {attempt.status}{took}{cause}")
        facts.append(("Attempt", f"{name}<br>{log_link(attempt.log, record)}"))
    if manifest is not None and step.state not in DONE:
        facts.append(("Published", f"by another run, {readable.moment(manifest.started)}"))
        manifest = None
    if manifest is not None and not step.attempts:
        facts.append(("Attempt", html.escape(manifest.attempt)))
    if manifest is not None:
        count, total = len(manifest.shards), sum(shard.bytes for shard in manifest.shards)
    else:
        count, total = step.shards, step.shard_bytes
    if count:
        facts.append(("Shards", f"{count:,}, {readable.size(total)}"))
    if step.state in ("running", "failed", "stopped") and step.progress:
        said = ", ".join(text for text in (step.progress, step.note) if text)
        facts.append(("Progress", html.escape(said)))
    facts += [("Warning", html.escape(message)) for message in step.warnings]
    return _list(facts)


def _list(facts: Iterable[tuple[str, str]]) -> str:
    """Name and HTML of each fact."""
    rows = "".join(f"<dt>{html.escape(name)}</dt><dd>{value}</dd>" for name, value in facts)
    return f"<dl>{rows}</dl>" if rows else ""


def _pairs(title: str, values: Mapping[str, str]) -> str:
    rows = _list((name, html.escape(text)) for name, text in values.items())
    return f"<h4>{title}</h4>{rows}" if rows else ""


def _links(title: str, links: list[str]) -> str:
    if not links:
        return ""
    more = len(links) - _MOST_LINKS
    shown = "".join(f"<li>{link}</li>" for link in links[:_MOST_LINKS])
    rest = "".join(f"<li>{link}</li>" for link in links[_MOST_LINKS:])
    if more > 0:
        rest = f"<details><summary>{more:,} more</summary><ul>{rest}</ul></details>"
    return f"<h4>{title}</h4><ul>{shown}</ul>{rest}"


def _inputs(step: StepRecord, context: Context) -> list[str]:
    return [
        f"{html.escape(name)} = {_step_link(context, key)}" for name, key in step.inputs.items()
    ]


def _step_link(context: Context, key: str) -> str:
    step = context.record.steps.get(key)
    if step is None:
        return f"<code>{html.escape(key)}</code>"
    return (
        f'<a href="{anchor(key)}">{html.escape(step.label)}</a> '
        f'<span class="soft">{STATES[step.state]}</span>'
    )


def run_link(summary: RunSummary, text: str | None = None) -> str:
    """A link to a run's page; only its name when no page was written."""
    words = html.escape(text or summary.run)
    if not summary.page:
        return words
    return f'<a href="{html.escape(quote(summary.run))}.html">{words}</a>'


def _run_link(summary: RunSummary, how: str) -> str:
    return f'{run_link(summary)} <span class="soft">{how} it</span>'


def _result(step: StepRecord, manifest: Manifest | None) -> dict[str, Any]:
    return step.result or (manifest.result if manifest is not None else {})


def _configuration(step: StepRecord, manifest: Manifest | None) -> str:
    config = manifest.config if manifest is not None else step.config
    tree = plain(config)
    text = json.dumps(tree, indent=1, ensure_ascii=False)
    shown = f"<h4>Configuration</h4><pre>{html.escape(text)}</pre>" if tree else ""
    if manifest is not None:
        shown += f'<p class="soft">{html.escape(manifest.step)}, version {manifest.version}</p>'
    return shown


def _provenance(manifest: Manifest | None) -> str:
    if manifest is None or not manifest.provenance:
        return ""
    known = manifest.provenance
    git = known.get("git") or {}
    commit = git.get("commit", "")[:12] + (
        " with uncommitted changes" * bool(git.get("uncommitted"))
    )
    names = ("host", "python", "platform", "cpus")
    facts = {name.capitalize(): str(known[name]) for name in names if known.get(name)}
    if commit:
        facts["Git"] = commit
    rest = {k: v for k, v in known.items() if k not in (*names, "git")}
    text = html.escape(json.dumps(rest, indent=1, ensure_ascii=False, default=str))
    return (
        _pairs("Built", {"When": readable.moment(manifest.started), **facts})
        + f"<details><summary>packages and flags</summary><pre>{text}</pre></details>"
    )
