"""The page of a run: one HTML file to look at, made from its event log and manifests.

Nothing is fetched when it is opened, so it works from a disk, a bucket or a mail. Links and panels
are plain anchors (`#step=KEY` opens a step's panel, by CSS alone); the script only adds what
anchors cannot: highlighting a step's lineage, zoom, and finding steps by name or state.
"""

from __future__ import annotations

import functools
import html
import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.errors import CorruptOutput
from pipeline.pages import readable
from pipeline.pages import record as run_record
from pipeline.pages.drawing import anchor, graph, timeline
from pipeline.pages.panel import Context, context, log_link, panel, run_link
from pipeline.pages.record import DONE, STATES, RunRecord, RunSummary, StepRecord
from pipeline.store import storage
from pipeline.store.manifest import Manifest, load

_MOST_PROBLEMS = 6
_OUTCOMES = {
    "ok": ("executed", "finished"),
    "failed": ("failed", "failed"),
    "interrupted": ("stopped", "interrupted"),
    "": ("running", "no end recorded"),
}


def write(prefix: str, run_id: str) -> str:
    """Write the page of a run and refresh the table of runs; returns the page's URL.

    The page of the run before is written again, because it can now link to this one.

    Raises:
        FileNotFoundError: when the store has no log of that run.
    """
    record = run_record.read(prefix, run_id)
    others = run_record.runs(prefix)
    manifests: dict[str, Manifest] = {}
    url = _write(prefix, record, manifests, others)
    others = [replace(o, page=True) if o.run == run_id else o for o in others]
    earlier = [other for other in others if other.page and other.started < record.started]
    if earlier:
        _write(prefix, run_record.read(prefix, earlier[0].run), manifests, others)
    _put(prefix, "index", render_index(run_record.runs(prefix)))
    return url


def _write(
    prefix: str, record: RunRecord, manifests: dict[str, Manifest], others: Sequence[RunSummary]
) -> str:
    """Write one page; `manifests` is filled with what it needs and was not there."""
    record.store = record.store or prefix

    def known(step: StepRecord) -> Manifest | None:
        try:
            found = load(storage.join(prefix, step.directory))
        except CorruptOutput as error:
            step.warnings.append(str(error))
            return None
        # A path has an abbreviated key, so it may belong to another output.
        return found if found is not None and found.key == step.key else None

    missing = [s for s in record.steps.values() if s.directory and s.key not in manifests]
    # Threads: on an object store each manifest is a round trip.
    with ThreadPoolExecutor(8) as pool:
        for step, found in zip(missing, pool.map(known, missing), strict=True):
            if found is not None:
                manifests[step.key] = found
    here = run_record.summarise(record)
    others = [here if other.run == record.run else other for other in others]
    return _put(prefix, record.run, render(record, manifests, others))


def _put(prefix: str, name: str, page: str) -> str:
    url = storage.join(prefix, "reports", f"{name}.html")
    storage.write_atomic(url, page.encode("utf-8", errors="replace"))
    return url


def render(
    record: RunRecord, manifests: Mapping[str, Manifest], others: Iterable[RunSummary]
) -> str:
    """The page of a run.

    Args:
        record: what happened.
        manifests: key -> manifest, for the steps that have one; may lack any.
        others: the runs to link to, newest first; may hold this one.
    """
    others = list(others)
    about = context(record, others)
    sizes = {
        step.key: sum(shard.bytes for shard in manifests[step.key].shards)
        for step in record.among(*DONE)
        if step.key in manifests
    }
    command = _command(record.command) or record.run
    body = [
        _navigation(record, others),
        _header(record, command),
        _cards(record),
        _problems(record),
        "<section><h2>Steps</h2>" + _tools(record) + f"<div class='card view'>"
        f"{graph(record, sizes)}</div></section>",
        f"<section><h2>Timeline</h2><div class='card scroll'>{timeline(record)}</div></section>",
        _settings(record),
    ]
    panels = "".join(panel(s, manifests.get(k), about) for k, s in record.steps.items())
    data = f'<script type="application/json" id="graph">{_script_json(_lineage(about))}</script>'
    script = f"<script>{_asset('page.js')}</script>"
    main = f"<main>{''.join(body)}</main>"
    return _document(f"{command} · {record.run}", main + panels + data + script)


def render_index(summaries: Sequence[RunSummary]) -> str:
    """The table of runs, in the order given."""
    names = ("when", "command", "outcome", "executed", "reused", "failed", "wall time")
    head = "".join(f"<th scope='col'>{name}</th>" for name in names)
    rows = "".join(_index_row(summary) for summary in summaries)
    table = f"<table class='runs'><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    count = f"<p class='soft'>{len(summaries)} runs, newest first</p>"
    body = f"<header><h1>Runs</h1>{count}</header><div class='card scroll'>{table}</div>"
    return _document("Runs", f"<main>{body}</main>")


def _index_row(summary: RunSummary) -> str:
    state, word = _OUTCOMES.get(summary.outcome, ("stopped", summary.outcome))
    cells = [
        run_link(summary, readable.moment(summary.started)),
        f"<code>{html.escape(_command(summary.command) or summary.run)}</code>",
        f"<span class='pill {state}'>{html.escape(word)}</span>",
        *(f"{len(keys):,}" for keys in (summary.executed, summary.reused, summary.failed)),
        readable.duration(summary.wall),
    ]
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _document(title: str, body: str) -> str:
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        "<meta name='color-scheme' content='light dark'><link rel='icon' href='data:,'>"
        f"<title>{html.escape(title)}</title><style>{_asset('page.css')}</style></head>"
        f"<body>{body}</body></html>\n"
    )


@functools.cache
def _asset(name: str) -> str:
    return Path(__file__).with_name(name).read_text("utf-8")


def _script_json(tree: Any) -> str:
    """JSON that cannot end the script element it stands in, whatever its strings are."""
    text = json.dumps(tree, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _lineage(about: Context) -> dict[str, Any]:
    """What the script needs: keys and labels in order of the boxes, parents by index."""
    steps = about.record.steps
    index = {key: i for i, key in enumerate(steps)}
    return {
        "keys": list(steps),
        "labels": [step.label for step in steps.values()],
        "parents": [[index[p] for p in s.inputs.values() if p in index] for s in steps.values()],
    }


def _command(words: Sequence[str]) -> str:
    return shlex.join(words)


def _navigation(record: RunRecord, others: Sequence[RunSummary]) -> str:
    earlier = [o for o in others if o.run != record.run and o.started <= record.started]
    later = [o for o in others if o.run != record.run and o.started > record.started]
    links = ["<a href='index.html'>All runs</a>"]
    if earlier:
        links.append(f"<span>← previous {run_link(earlier[0])}</span>")
    if later:
        links.append(f"<span>next {run_link(later[-1])} →</span>")
    return f"<nav aria-label='runs'>{''.join(links)}</nav>"


def _header(record: RunRecord, command: str) -> str:
    state, word = _OUTCOMES.get(record.outcome, ("stopped", record.outcome))
    facts = [f"run {record.run}", f"started {readable.moment(record.started)}"]
    if not record.outcome:
        facts.append(
            f"last heard of {readable.moment(record.last)}: the driver was killed or still runs"
        )
    if record.store:
        facts.append(f"store {record.store}")
    if record.torn:
        facts.append(f"{record.torn} unreadable line{'s' * (record.torn > 1)} in the event log")
    lines = "".join(f"<span>{html.escape(fact)}</span>" for fact in facts)
    return (
        f"<header><h1><code>{html.escape(command)}</code> "
        f"<span class='pill {state}' id='outcome'>{html.escape(word)}</span></h1>"
        f"<p class='soft facts'>{lines}</p></header>"
    )


def _cards(record: RunRecord) -> str:
    reused = record.among("reused", "elsewhere")
    cards = [
        ("wall", readable.duration(record.wall), "wall time"),
        ("executed", f"{len(record.among('executed')):,}", "executed"),
        ("reused", f"{len(reused):,}", "reused"),
        ("failed", f"{len(record.among('failed')):,}", "failed"),
        ("saved", readable.duration(record.saved), "saved by reuse"),
    ]
    if pending := record.among("running", "waiting", "stopped", "unreached"):
        cards.insert(4, ("pending", f"{len(pending):,}", "not finished"))
    items = "".join(
        f"<div class='card' id='card-{name}'><b>{figure}</b><span>{what}</span></div>"
        for name, figure, what in cards
    )
    return f"<section class='cards' aria-label='summary'>{items}</section>"


def _problems(record: RunRecord) -> str:
    """Failures first, then warnings, each with a link to its step."""
    items = []
    for step in record.among("failed"):
        log = f"<br>log {log_link(step.log, record)}" if step.log else ""
        items.append(_problem("failed", step.label, step.key, step.cause or "no cause given", log))
    for step in record.steps.values():
        items += [_problem("warned", step.label, step.key, text, "") for text in step.warnings]
    if not items:
        return ""
    shown, rest = "".join(items[:_MOST_PROBLEMS]), ""
    if more := items[_MOST_PROBLEMS:]:
        rest = (
            f"<details><summary>{len(more):,} more</summary>"
            f"<ul class='problems'>{''.join(more)}</ul></details>"
        )
    return f"<section aria-label='problems'><ul class='problems'>{shown}</ul>{rest}</section>"


def _problem(kind: str, label: str, key: str, text: str, more: str) -> str:
    word = "failed" if kind == "failed" else "warning"
    link = f"<a href='{anchor(key)}'>{html.escape(label)}</a>"
    return f"<li class='{kind}'><b>{word}</b> {link} {html.escape(text)}{more}</li>"


def _tools(record: RunRecord) -> str:
    """The legend, whose entries pick the steps of a state, and the zoom."""
    counts = {state: len(record.among(state)) for state in STATES}
    legend = "".join(
        f"<button type='button' class='key {state}' data-state='{state}' aria-pressed='false'>"
        f"<i></i>{name} {counts[state]:,}</button>"
        for state, name in STATES.items()
        if counts[state]
    )
    return (
        f"<div class='tools'>{legend}<span class='push'></span><span class='zoom'>"
        "<input type='search' id='find' placeholder='Find a step' aria-label='find a step'>"
        "<button type='button' id='smaller' aria-label='zoom out'>&#8722;</button>"
        "<button type='button' id='fit'>fit</button>"
        "<button type='button' id='larger' aria-label='zoom in'>+</button></span></div>"
    )


def _settings(record: RunRecord) -> str:
    if not record.settings:
        return ""
    text = html.escape(json.dumps(record.settings, indent=1, ensure_ascii=False))
    return (
        f"<details class='card'><summary>Settings of the run</summary><pre>{text}</pre></details>"
    )
