"""The text of `plan` about one step: its status, the changes and their consequences."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.plan.plan import FEW, Planned
from pipeline.store import storage
from pipeline.store.outputs import Store


def explain(planned: list[Planned], entry: Planned, store: Store) -> Iterator[str]:
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
    yield from _inputs(planned, entry)
    yield from _consequences(planned, entry)


def _inputs(planned: list[Planned], entry: Planned) -> Iterator[str]:
    by_key = {other.node.key: other for other in planned}
    for name, child in entry.node.inputs.items():
        live = ", live" if name in entry.node.live else ""
        yield f"  input      {name} = {child.label} ({by_key[child.key].status}{live})"


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
