"""The pages of runs: one HTML file per run and a table of runs, from event logs and manifests.

A page fetches nothing and runs no script, so it works from a disk, a bucket or a mail. Links into
the store are relative: a copied or moved store never links to the old one.
"""

from __future__ import annotations

import functools
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from pipeline.errors import CorruptOutput
from pipeline.execute.run_record import DONE, STATES, RunRecord, StepRecord
from pipeline.identity.fingerprint import plain
from pipeline.pages import readable
from pipeline.pages import record as run_record
from pipeline.pages.graph import Box, draw
from pipeline.plan.state import NOT_BUILT
from pipeline.store import storage
from pipeline.store.manifest import Manifest, load
from pipeline.store.parallel import concurrently
from pipeline.store.shards import ShardTable

_TEMPLATES = Path(__file__).with_name("templates")
_TICK_SECONDS = (0.25, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200)
_MOST_BARS = 60


@functools.cache
def environment(folder: Path = _TEMPLATES) -> Environment:
    """Templates of `folder`, which can extend those of run pages; all text is escaped."""
    made = Environment(
        loader=FileSystemLoader([folder, _TEMPLATES]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    made.filters |= {
        "duration": readable.duration,
        "size": readable.size,
        "moment": readable.moment,
        "number": readable.number,
        "flat": readable.flat,
        "urlquote": quote,
    }
    return made


def write(prefix: str, run_id: str) -> str:
    """Write the page of a run and refresh the table of runs; returns the page's URL.

    The page of the previous run is written again, because it can now link to this one.
    """
    others = run_record.runs(prefix)
    for other in others:
        other.page = other.page or other.run == run_id
    record = run_record.read(prefix, run_id)
    url = _write(prefix, record, others)
    earlier = [other for other in others if other.page and other.started < record.started]
    if earlier:
        _write(prefix, run_record.read(prefix, earlier[0].run), others)
    _put(prefix, "index", render_index(others))
    return url


def _write(prefix: str, record: RunRecord, others: Sequence[RunRecord]) -> str:
    record.store = record.store or prefix
    steps = [step for step in record.steps.values() if step.directory]
    found = concurrently(functools.partial(output, prefix), steps, prefix)
    manifests = own_manifests(zip(steps, found, strict=True))
    beside = [other for other in others if other.page and other.run != record.run]
    earlier = next((o.run for o in beside if o.started <= record.started), "")
    later = next((o.run for o in reversed(beside) if o.started > record.started), "")
    return _put(prefix, record.run, render(record, manifests, earlier, later))


def output(prefix: str, step: StepRecord) -> Manifest | CorruptOutput | None:
    """The manifest in a step's directory; None without one."""
    try:
        return load(storage.join(prefix, step.directory))
    except CorruptOutput as error:
        return error


def own_manifests(
    found: Iterable[tuple[StepRecord, Manifest | CorruptOutput | None]],
) -> dict[str, Manifest]:
    """The steps' manifests by key; a corrupt output is a warning of its step."""
    manifests = {}
    for step, manifest in found:
        if isinstance(manifest, CorruptOutput) and str(manifest) not in step.warnings:
            step.warnings.append(str(manifest))
        # A path has an abbreviated key, so it may belong to another output.
        if isinstance(manifest, Manifest) and manifest.key == step.key:
            manifests[step.key] = manifest
    return manifests


def _put(prefix: str, name: str, page: str) -> str:
    url = storage.join(prefix, "reports", f"{name}.html")
    storage.write_atomic(url, page.encode("utf-8", errors="replace"))
    return url


def render(
    record: RunRecord,
    manifests: Mapping[str, Manifest],
    earlier: str = "",
    later: str = "",
    curves: Container[str] = (),
) -> str:
    """The page of a run, with links to the runs before and after, or of a plan.

    The directories of the steps `curves` (keys) are pages.
    """
    steps = list(record.steps.values())
    users: dict[str, list[StepRecord]] = {}
    for step in steps:
        for key in dict.fromkeys(step.inputs.values()):
            users.setdefault(key, []).append(step)
    done = {s.key: manifests[s.key] for s in record.among(*DONE) if s.key in manifests}
    commits = [(m.provenance.get("git") or {}).get("commit") for m in done.values()]
    template = environment().get_template("run.html")
    return template.render(
        record=record,
        command=readable.command_line(record.command),
        commit=record.commit or next(filter(None, commits), ""),
        earlier=earlier,
        later=later,
        states=STATES,
        counts={state: len(record.among(state)) for state in STATES},
        drawing=draw([_box(step, done.get(step.key)) for step in steps]),
        timeline=_timeline(record),
        manifests=manifests,
        done=done,
        users=users,
        explained={step.key: _explanation(step, manifests.get(step.key)) for step in steps},
        beyond=_beyond(record),
        config={
            step.key: plain(getattr(manifests.get(step.key), "config", step.config))
            for step in steps
        },
        results={step.key: _results(step, done.get(step.key)) for step in steps},
        pages={key: _html_files(manifest) for key, manifest in done.items()},
        relative=functools.partial(_relative, record),
        curves=curves,
    )


def render_index(
    records: Sequence[RunRecord], total: int = 0, links: Sequence[tuple[str, str]] = ()
) -> str:
    """The table of runs: all, or some of a `total` with `links` to the others."""
    named = [(record, readable.command_line(record.command)) for record in records]
    page = environment().get_template("index.html")
    return page.render(runs=named, total=total or len(named), links=links, relative=_relative)


def _beyond(record: RunRecord) -> list[str]:
    """Lines of the run's cause beyond the failures of its steps, which have their own place."""
    failed = record.among("failed")
    said = {f"step {step.label} failed: {step.cause}" for step in failed}
    logs = {f"  log:   {step.log}" for step in failed}
    return [line for line in record.cause.splitlines() if line not in said | logs]


def _box(step: StepRecord, manifest: Manifest | None) -> Box:
    parts = [STATES[step.state]]
    if step.seconds is not None:
        parts.append(readable.duration(step.seconds))
    if manifest is not None and manifest.size:
        parts.append(readable.size(manifest.size))
    return Box(step.key, step.label, " · ".join(parts), step.state, list(step.inputs.values()))


def _explanation(step: StepRecord, manifest: Manifest | None) -> str:
    """Why the step is in its state, in one sentence; may be empty."""
    built = f"built on {readable.moment(manifest.started)}" if manifest is not None else ""
    if step.cause and step.state != "executed":
        return step.cause
    if step.state == "elsewhere":
        return f"{built or 'built'} in {step.origin}"
    if step.state == "reused":
        return step.reason or built
    if step.state == "unreached":
        return "the run ended before it could start"
    if step.state == "unneeded":
        return "the steps that use it are up to date"
    if step.state == "executed" and step.reason == NOT_BUILT:
        return "had not been built before"
    return step.reason or (step.progress if step.state != "executed" else "")


def _results(step: StepRecord, manifest: Manifest | None) -> dict[str, dict[str, Any]]:
    """Heading -> names and values: the result, then measured times, then other measurements."""
    tree = dict(step.result or (manifest.result if manifest is not None else {}))
    tree.pop("headline", None)
    found: dict[str, dict[str, Any]] = {"Result": {}, "Where the time went": {}, "Measured": {}}
    for name, value in readable.flat(tree).items():
        part = name.removeprefix("measured.seconds.")
        if part != name and isinstance(value, (int, float)):
            found["Where the time went"][part.replace("_", " ")] = readable.duration(value)
        else:
            rest = name.removeprefix("measured.")
            found["Result" if rest == name else "Measured"][rest] = value
    return found


def _html_files(manifest: Manifest) -> list[str]:
    """Pages among an output's files, relative to its directory; not looked for in a table."""
    if isinstance(manifest.shards, ShardTable):
        return []
    return [
        f"{shard.root}/{file.path}"
        for shard in manifest.shards
        for file in shard.files
        if file.path.endswith(".html") and manifest.alias is None
    ]


def _relative(record: RunRecord, url: str) -> str:
    """A relative link from the page to a URL in the same store; empty for any other URL."""
    base = record.store.rstrip("/") + "/"
    return quote("../" + url.removeprefix(base)) if url.startswith(base) and base != "/" else ""


def _timeline(record: RunRecord) -> dict[str, Any] | None:
    """Bars in percent of the run's time; None if no step waited or ran."""
    seen = [s for s in record.steps.values() if s.attempts or s.queued is not None]
    if not seen:
        return None
    ends = [a.ended for s in seen for a in s.attempts if a.ended]
    end = max([*ends, record.started + record.wall, record.started + 0.001])
    span = end - record.started

    def bar(kind: str, start: float, stop: float | None, text: str) -> dict[str, Any]:
        stop = end if stop is None else stop
        left = 100 * min(max((start - record.started) / span, 0.0), 1.0)
        width = max(100 * min((stop - record.started) / span, 1.0) - left, 0.0)
        title = f"{text}, {readable.duration(stop - start)}"
        return {"kind": kind, "style": f"left:{left:.3f}%;width:{width:.3f}%", "title": title}

    rows = []
    for step in sorted(seen, key=lambda s: s.attempts[0].started if s.attempts else end):
        bars = []
        if step.queued is not None and step.state != "unreached":
            until = step.attempts[0].started if step.attempts else step.ended
            bars.append(bar("queued", step.queued, until, "waited"))
        for i, attempt in enumerate(step.attempts, 1):
            cause = f": {attempt.cause}" if attempt.cause else ""
            text = f"attempt {i} {attempt.status}{cause}"
            bars.append(bar(attempt.status, attempt.started, attempt.ended, text))
        rows.append((step, bars))
    # The shortest tick interval of which at most four fit; beyond the list, whole days.
    every = next((t for t in _TICK_SECONDS if span / t <= 4), 86400 * (1 + span // 345_600))
    ticks = [
        (f"left:{100 * i * every / span:.3f}%", _tick(i * every))
        for i in range(int(0.9 * span / every) + 1)
    ]
    return {"rows": rows[:_MOST_BARS], "more": len(rows[_MOST_BARS:]), "ticks": ticks}


def _tick(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:g} s"
    return f"{seconds / 60:g} min" if seconds < 3600 else f"{seconds / 3600:g} h"
