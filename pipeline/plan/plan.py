"""The plan of a run: reads the store, executes no step and imports no machine learning library."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pipeline.graph.order import topological
from pipeline.graph.step import Node
from pipeline.identity import digests, source_code
from pipeline.plan.changes import NEVER, ChangeLog
from pipeline.plan.state import (
    CORRUPT,
    FOREIGN,
    GraphState,
    contents,
    foreign_build,
    inputs_first,
    read_state,
    required,
)
from pipeline.store import lease, storage
from pipeline.store.builds import Build, find_build, is_mixed, named, other_code
from pipeline.store.ledger import Ledger
from pipeline.store.manifest import FAILURE, Manifest
from pipeline.store.outputs import Found, Store
from pipeline.store.shards import ATTEMPTS

FEW = 3  # differences that a reason lists; of more it has the number
_NAMED = 5  # steps named in a reason


@dataclass(frozen=True)
class Planned:
    """One step of the plan.

    Its `status` is "hit", "unchecked" (a hit whose sources cannot be listed), "stale", "partial",
    "running", "failed", "miss", "corrupt", or "foreign": of another step of this name.
    """

    node: Node
    path: str
    status: str
    reason: str  # one line: what is reused, how many shards are finished, what changed
    needed: bool = False  # a run would execute it; an input of a hit is not needed
    refused: bool = False  # a run stops at once: only --force replaces a corrupt or foreign output
    left_out: bool = False  # a run stops at once: --only leaves out this step, which is needed
    found: Found | None = None  # the output, for a hit
    detail: str = ""  # its progress: finished shards, a failure, the process that runs it
    beside: tuple[str, ...] = ()  # labels of the steps to run that it follows while they run
    nearest: str = ""  # directory of the earlier output that the reason compares with
    lines: list[str] = field(default_factory=list)  # differences from it, or from the stale output
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # on sources: unreachable, with unread files
    sources: dict[str, str] = field(default_factory=dict)

    @property
    def reused(self) -> bool:
        return self.found is not None and not self.needed


def plan(
    targets: list[Node],
    store: Store,
    forced: frozenset[str] = frozenset(),
    *,
    keep_shards: bool = False,
    only: frozenset[str] = frozenset(),
) -> list[Planned]:
    """What bringing `targets` up to date would do, inputs first.

    `forced` has keys, and `only` those of the steps that alone may run, none for all.
    """
    order = topological(targets)
    seen = read_state(order, store)
    needed = required(targets, order, seen, forced, only)
    left_out = needed - only if only else frozenset[str]()
    how = _How(forced, keep_shards, needed, left_out, _waits(order, needed))
    reasons = ChangeLog(store)
    described = inputs_first(lambda n: _describe(n, store, seen, reasons, how), order, store)
    return [described[node.key] for node in order]


class _How(NamedTuple):
    forced: frozenset[str]
    keep_shards: bool
    needed: Set[str]
    left_out: Set[str]
    waits: Mapping[str, str]


def _waits(order: list[Node], needed: set[str]) -> dict[str, str]:
    above: dict[str, list[str]] = {}
    for node in order:
        if node.key in needed:
            above[node.key] = [node.label]
        else:
            found = [label for child in node.inputs.values() for label in above.get(child.key, ())]
            above[node.key] = list(dict.fromkeys(found))[:_NAMED]
    return {
        key: f"; built again if {' or '.join(labels)} comes out differently"
        for key, labels in above.items()
        if labels
    }


def _describe(node: Node, store: Store, seen: GraphState, reasons: ChangeLog, how: _How) -> Planned:
    path, needed = store.path(node), node.key in how.needed
    build = _build_of(node, path, seen, how) if needed else None
    kept, again = _other_code(node, path, build, how)
    live = (node.inputs[name] for name in sorted(node.live))

    def entry(status: str, reason: str, warnings: Iterable[str] = (), **more: Any) -> Planned:
        return Planned(
            node,
            path,
            status,
            reason,
            needed=needed,
            left_out=node.key in how.left_out,
            warnings=[*warnings, *kept],
            notes=[*source_notes(node, seen), *again],
            beside=tuple(child.label for child in live if {node.key, child.key} <= how.needed),
            sources={name: str(at.summary) for name, at in seen.listings.of(node).items()},
            **more,
        )

    refused = needed and node.key not in how.forced
    if node.key in seen.corrupt:
        return entry(CORRUPT, seen.corrupt[node.key], refused=refused)
    if node.key in seen.foreign:
        return entry(FOREIGN, seen.foreign[node.key], refused=refused)
    if (found := seen.found.get(node.key)) is not None:
        unchecked = node.key in seen.listings.unreachable
        return entry(
            "unchecked" if unchecked else "hit",
            _hit_reason(found, same=node.key in seen.same) + how.waits.get(node.key, ""),
            code_warnings(node, found.manifest),
            found=found,
        )
    if node.key in seen.stale:
        reasons.because(node, [seen.stale[node.key]])
        lines = seen.stale[node.key].split("; ")
        return entry("stale", _few(lines), lines=lines)
    state, detail = _unfinished(path, build)
    nearest, lines = reasons.explain(node)
    why = _few(lines) or NEVER
    reason = f"{detail}; {why}" if detail else why
    return entry(state, reason, detail=detail, nearest=nearest, lines=lines)


def _few(lines: list[str]) -> str:
    if len(lines) <= FEW:
        return "; ".join(lines)
    inputs = " and inputs" if any(line.startswith("input ") for line in lines) else ""
    return f"{len(lines)} settings{inputs} differ from the nearest output"


def _unfinished(path: str, build: Build | None) -> tuple[str, str]:
    """("running" | "failed" | "partial" | "miss", detail) of a step without an output."""
    if not storage.exists(path):
        return "miss", ""
    unresponsive = ""
    if (holder := lease.holder(path)) is not None:
        if holder.responsive:
            return "running", str(holder)
        unresponsive = f"owner does not respond: {holder}"
    finished = shards = _how_far(Ledger(path, build.id)) if build is not None else ""
    if build is not None:
        why = ("an unfinished build is not resumed", *build.conflicts) if build.conflicts else ()
        shards = "; ".join([*filter(None, [shards]), *why, *giving_up(path, build)])
    failure = last_failure(path)
    if failure is not None:
        cause = f"{failure['cause']} (log: {failure['log']})"
        return "failed", f"{cause}; {shards}" if shards else cause
    detail = "; ".join(filter(None, (shards, unresponsive)))
    return ("partial" if finished or unresponsive else "miss"), detail


def _how_far(ledger: Ledger) -> str:
    """Progress of a build: that of its last shard, or its count of shards; empty without any."""
    finished, expected = ledger.count()
    if finished and not expected:
        last = ledger.find(max(ledger.shard_names(), default=""))
        if last is not None and last.result.get("progress"):
            return str(last.result["progress"])
    return f"{finished} of {expected or '?'} shards finished" if finished else ""


def giving_up(path: str, build: Build) -> list[str]:
    if not build.given_up:
        return []
    return [f"--force gives up an unfinished build: {_how_far(Ledger(path, build.given_up))}"]


def _other_code(
    node: Node, path: str, build: Build | None, how: _How
) -> tuple[list[str], list[str]]:
    """(warnings of what other code wrote and a run would keep, notes of what it builds again)."""
    if build is None or not Ledger(path, build.id).shard_names():
        return [], []
    code = source_code.record(*node.functions)
    ledger = Ledger(path, build.id, source_code.code_digest(code), how.keep_shards)
    if problem := foreign_build(node, ledger):
        return [f"{node.label}: {problem}"], []
    records = ledger.records(ledger.shard_names()) if is_mixed(ledger) else {}
    other, (_, expected) = other_code(ledger, records, code["sources"]), ledger.count()
    # Shards that report progress are states from which a step continues, such as checkpoints.
    if any(records[name].shard.result.get("progress") for name in other.shards):
        return [f"{node.label}: {other.continued}"], []
    kept, again = other.lines(expected or len(records), keep=how.keep_shards)
    return [f"{node.label}: {line}" for line in kept], [f"{node.label}: {line}" for line in again]


def _build_of(node: Node, path: str, seen: GraphState, how: _How) -> Build | None:
    """The build that a run would begin or resume; None for none, or while an input is missing."""
    if node.key in seen.listings.unreachable or not storage.exists(path):
        return None
    held = seen.listings.digests(node)
    for name, child in node.inputs.items():
        found = seen.found.get(child.key)
        if found is not None:
            held[name] = found.manifest.build if name in node.live else found.manifest.content
            continue
        below = contents(child, seen.found, seen.listings) if name in node.live else None
        if below is None:
            return None
        action = digests.action(child.identity, below)
        config = child.identity.config
        place = storage.join(path.rpartition("/")[0], child.directory)
        held[name] = find_build(place, action, "", config, below).id
    action = digests.action(node.identity, held)
    replaces = seen.replaces(node.key)
    forced = node.key in how.forced and not replaces
    return find_build(path, action, replaces, node.identity.config, held, forced=forced)


def last_failure(path: str) -> dict[str, Any] | None:
    attempts = storage.join(path, ATTEMPTS)
    names = storage.list_names(attempts)
    if not names:
        return None
    try:
        failure = storage.read_json(storage.join(attempts, names[-1], FAILURE))
        log = storage.join(attempts, names[-1], "log.txt")
        return {"cause": str(failure["cause"]), "log": log}
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None


def _hit_reason(found: Found, *, same: bool) -> str:
    reason = f"built in {found.manifest.seconds:.1f} s, {found.manifest.size / 1e6:,.1f} MB"
    if same:
        return f"{reason}; made before from inputs of the same content: {found.path}"
    if found.shared:
        return f"{reason}; shared: {found.path}"
    if (alias := found.manifest.alias) is not None:
        ignored = f", ignoring {'; '.join(alias.differences)}" if alias.differences else ""
        return f"{reason}; {alias.kind}: {alias.directory}{ignored}"
    return reason


def source_notes(node: Node, seen: GraphState) -> list[str]:
    if (cause := seen.listings.unreachable.get(node.key)) is not None:
        use = "; the output that is there is used unchecked" if node.key in seen.found else ""
        return [f"{cause}{use}"]
    return [
        f"{node.label}: {name} {at.where} matches what is not read: {named(at.skipped)}"
        for name, at in seen.listings.of(node).items()
        if at.skipped
    ]


def code_warnings(node: Node, published: Manifest) -> list[str]:
    """Warnings if the step's code has changed since, or while, the output was built."""
    kept = (published.provenance.get("other_code") or {}).get("kept")
    mixed = [f"{node.label}: --keep-shards kept {shards_line(kept)}"] if kept else []
    files = source_code.changed(
        node.step.function, published.provenance.get("sources") or {}, *node.functions[1:]
    )
    if not files:
        return mixed
    changed = f"{node.label}: code changed since this output was built: {named(files)}"
    if len(node.functions) > 1:  # whose authors are users
        changed += f"; it is used as it is: --force {node.label}, or another version=, builds it"
    return [*mixed, changed]


def shards_line(other: Mapping[str, Any]) -> str:
    return "{shards} of {of} shards, built by other code ({files})".format(**other)


def explain(planned: list[Planned], entry: Planned, store: Store) -> Iterator[str]:
    """The lines of one step: its status, the changes and their consequences."""
    node = entry.node
    action = "would be built" if entry.needed else "is not needed"
    yield f"{node.label}: {entry.status}; {'is reused' if entry.reused else action}"
    yield f"  key        {node.key}"
    yield f"  directory  {entry.path}"
    yield f"  step       {node.step.name}, version {node.step.version}"
    if entry.found is not None:
        yield f"  reason     {entry.reason}"
        if entry.found.elsewhere:
            yield f"  files are  {entry.found.elsewhere}"
    else:
        if entry.nearest:
            yield f"  nearest    {storage.join(store.prefix, entry.nearest)}"
        else:
            yield f"  reason     {entry.reason}"
        if entry.nearest or len(entry.lines) > FEW:
            yield from (f"    {line}" for line in entry.lines)
        if entry.nearest and entry.detail:
            yield f"  so far     {entry.detail}"
    for name, listing in entry.sources.items():
        yield f"  source     {name} = {listing}"
    for warning in [*entry.warnings, *entry.notes]:
        yield f"  warning    {warning}"
    status = {other.node.key: other.status for other in planned}
    for name, child in node.inputs.items():
        live = ", live" if name in node.live else ""
        yield f"  input      {name} = {child.label} ({status[child.key]}{live})"
    yield from _consequences(planned, entry)


def _consequences(planned: list[Planned], entry: Planned) -> Iterator[str]:
    if not entry.needed:
        return
    reached = {entry.node.key}
    for other in planned:
        if any(child.key in reached for child in other.node.inputs.values()):
            reached.add(other.node.key)
            if entry.node.label in other.beside:
                then = "starts while it runs, and ends after it"
            elif other.reused:
                then = "reused unless the new content differs"
            elif other.node.step.reads_lineage or not other.needed:
                then = "runs" if other.needed else "not needed"
            else:
                then = "runs, unless the same contents were read before"
            yield f"  then       {other.node.label}: {then}"
