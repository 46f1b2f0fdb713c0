"""What changed since the nearest earlier output of a step, field by field, down to the root.

A step that only follows an input names the change it follows from, not the whole chain of reasons
between: in a graph where ways meet again those would double at every layer.
"""

from __future__ import annotations

from collections.abc import Iterable

from pipeline.errors import CorruptOutput
from pipeline.graph.node import Node
from pipeline.identity import fingerprint
from pipeline.store import manifest, storage
from pipeline.store.manifest import Manifest
from pipeline.store.outputs import Store

NEVER = "never built here"
_ROOTS = 8  # causes remembered for a step; "and 3 more" is counted among these
_SAME_LABEL, _SAME_CONFIG, _NEWEST = 8, 4, 4  # earlier outputs compared with, of each kind


class _Outputs:
    """The readable outputs of one step function, ready to be asked for similar ones."""

    def __init__(self, found: dict[str, Manifest]) -> None:
        self._newest = sorted(found.items(), key=lambda item: -item[1].started)
        self._by_label: dict[str, list[tuple[str, Manifest]]] = {}
        self._by_config: dict[str, list[tuple[str, Manifest]]] = {}
        for item in self._newest:
            self._by_label.setdefault(item[1].label, []).append(item)
            self._by_config.setdefault(fingerprint.digest(item[1].config), []).append(item)

    def like(self, node: Node) -> dict[str, Manifest]:
        """A few outputs the node may be a change of, by directory."""
        config = fingerprint.digest(node.identity.config)
        return dict(
            [
                *self._by_label.get(node.label, [])[:_SAME_LABEL],
                *self._by_config.get(config, [])[:_SAME_CONFIG],
                *self._newest[:_NEWEST],
            ]
        )


class ChangeLog:
    """Explains the steps of one graph, inputs first, against what a store has from before."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._names: dict[str, list[str]] | None = None
        self._outputs: dict[str, _Outputs] = {}
        self._roots: dict[str, list[str]] = {}

    def because(self, node: Node, causes: Iterable[str]) -> None:
        """Remember why a step is not what it was, for the steps that use it."""
        self._roots[node.key] = [f"{node.label}: {cause}" for cause in causes]

    def explain(self, node: Node) -> tuple[str, list[str]]:
        """(directory of the nearest earlier output, its differences to the node, a line a field).

        ("", []) when there is none. Inputs must have been explained before.
        """
        best: tuple[str, list[str]] = ("", [])
        for directory, old in self._outputs_of(node.step.name).like(node).items():
            lines = self.differences(old, node)
            if lines and (not best[0] or len(lines) < len(best[1])):
                best = (directory, lines)
        own = [line for line in best[1] if not line.startswith("input ")]
        self.because(node, own if best[0] else [NEVER])
        for child in node.inputs.values():
            known = self._roots[node.key]
            known += [root for root in self._roots.get(child.key, ()) if root not in known]
            del known[_ROOTS:]
        return best

    def differences(self, old: Manifest, node: Node) -> list[str]:
        """What would be built otherwise than `old` was, a line a field."""
        lines = fingerprint.difference(old.config, node.identity.config)
        if old.version != node.step.version:
            lines.append(f"version: {old.version} -> {node.step.version}")
        for name in sorted({*old.inputs, *node.inputs}):
            new = node.inputs.get(name)
            if name not in old.inputs or new is None:
                lines.append(f"input {name}: {'added' if new is not None else 'removed'}")
            elif old.inputs[name]["key"] != new.key:
                lines.append(f"input {name} changed{self._said(new)}")
        return lines

    def _said(self, child: Node) -> str:
        first, *more = self._roots.get(child.key) or [""]
        return f" ({first}{f' and {len(more)} more' if more else ''})" if first else ""

    def _outputs_of(self, step: str) -> _Outputs:
        if self._names is None:
            self._names = {}
            for name in self._store.outputs():
                self._names.setdefault(name.rpartition("-")[0], []).append(name)
        if step not in self._outputs:
            found = {name: self._load(name) for name in self._names.get(step, ())}
            self._outputs[step] = _Outputs({n: m for n, m in found.items() if m is not None})
        return self._outputs[step]

    def _load(self, name: str) -> Manifest | None:
        try:
            return manifest.load(storage.join(self._store.prefix, name))
        except CorruptOutput:
            return None
