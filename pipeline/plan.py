"""What a run would do, and why: looks at the store, runs nothing, imports nothing of ML."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeline import fingerprint, lease, manifest, provenance, storage
from pipeline.errors import DamagedOutput
from pipeline.ledger import Ledger
from pipeline.manifest import Manifest
from pipeline.step import Node, topological


@dataclass(frozen=True)
class Planned:
    """One step of the plan.

    Attributes:
        status: "hit", "partial", "running", "miss" or "damaged".
        reason: one line: what is reused, how many shards are there, what changed.
        needed: whether a run would execute it (an input of a hit is not needed).
        published: the manifest, for a hit.
        warnings: what a user should know, such as code changed since the output was built.
    """

    node: Node
    path: str
    status: str
    reason: str
    needed: bool = False
    published: Manifest | None = None
    warnings: list[str] = field(default_factory=list)


class _Earlier:
    """Manifests in the store by step function, read once and only when a reason is wanted."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._names: list[str] | None = None
        self._by_label: dict[str, list[Manifest]] = {}

    def of(self, label: str) -> list[Manifest]:
        if label not in self._by_label:
            if self._names is None:
                self._names = storage.list_names(self._prefix)
            found = []
            for name in self._names:
                if name.rpartition("-")[0] == label:
                    try:
                        found.append(manifest.load(storage.join(self._prefix, name)))
                    except DamagedOutput:
                        continue
            self._by_label[label] = [m for m in found if m is not None]
        return self._by_label[label]


def plan(targets: list[Node], prefix: str) -> list[Planned]:
    """The plan for bringing `targets` up to date in the store at `prefix`, inputs first."""
    earlier = _Earlier(prefix)
    order = topological(targets)
    looked = {node.key: _look(node, prefix) for node in order}
    needed = needed_keys(targets, {key for key, p in looked.items() if p.status == "hit"})
    changed: dict[str, str] = {}
    planned = []
    for node in order:
        entry = looked[node.key]
        if entry.status in ("miss", "partial", "running"):
            why = _reason(node, earlier.of(node.step.label), changed)
            changed[node.key] = why
            reason = f"{entry.reason}; {why}" if entry.reason else why
        else:
            reason = entry.reason
        planned.append(
            Planned(
                node,
                entry.path,
                entry.status,
                reason,
                node.key in needed,
                entry.published,
                entry.warnings,
            )
        )
    return planned


def needed_keys(targets: list[Node], hits: set[str]) -> set[str]:
    """Keys of the steps to execute: targets that are no hits, and what those need, in turn."""
    needed: set[str] = set()
    stack = list(targets)
    while stack:
        node = stack.pop()
        if node.key not in hits and node.key not in needed:
            needed.add(node.key)
            stack.extend(node.inputs.values())
    return needed


def _look(node: Node, prefix: str) -> Planned:
    path = storage.join(prefix, node.directory)
    try:
        published = manifest.load_verified(path, node.key)
    except DamagedOutput as error:
        return Planned(node, path, "damaged", str(error))
    if published is not None:
        return Planned(
            node,
            path,
            "hit",
            _hit_reason(published),
            published=published,
            warnings=_code_warning(node, published),
        )
    finished = len(Ledger(path).finished()) if storage.exists(path) else 0
    if finished or storage.exists(path):
        holder = lease.holder(path)
        if holder is not None:
            host = str(holder.get("host", "?")).split(" ")[0]
            return Planned(node, path, "running", f"process {holder.get('pid')} on {host}")
    if finished:
        return Planned(node, path, "partial", f"{finished} shards finished")
    return Planned(node, path, "miss", "")


def _hit_reason(published: Manifest) -> str:
    size = sum(shard.bytes for shard in published.shards)
    return f"built in {published.seconds:.1f} s, {size / 1e6:,.1f} MB"


def _code_warning(node: Node, published: Manifest) -> list[str]:
    then = published.provenance.get("source")
    now = provenance.source_digest(node.step.function)
    if then and now and then != now:
        return [f"{node.label}: the step's code changed since this output was built"]
    return []


def _reason(node: Node, candidates: list[Manifest], changed: dict[str, str]) -> str:
    """Why there is no output: the differences to the nearest earlier manifest, or a first time."""
    nearest: tuple[int, list[str]] | None = None
    for old in candidates:
        lines = fingerprint.difference(old.config, node.canonical_config)
        if old.version != node.step.version:
            lines.append(f"version: {old.version} -> {node.step.version}")
        for name in sorted({*old.inputs, *node.inputs}):
            lines += _input_difference(name, old, node, changed)
        if lines and (nearest is None or len(lines) < nearest[0]):
            nearest = (len(lines), lines)
    return "; ".join(nearest[1]) if nearest else "never built here"


def _input_difference(name: str, old: Manifest, node: Node, changed: dict[str, str]) -> list[str]:
    new = node.inputs.get(name)
    if name not in old.inputs or new is None:
        return [f"input {name}: {'added' if new is not None else 'removed'}"]
    if old.inputs[name]["key"] == new.key:
        return []
    why = changed.get(new.key)
    return [f"input {name} changed" + (f" ({new.label}: {why})" if why else "")]
