"""The changes since the most similar earlier output of a step, field by field, with root causes.

A step that changes only because of an input reports the root cause, not the chain of steps between.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from pipeline.graph.step import Node
from pipeline.identity import fingerprint
from pipeline.store import storage
from pipeline.store.manifest import Manifest, readable
from pipeline.store.outputs import Store
from pipeline.store.parallel import by_item

NEVER = "never built here"
_ROOTS = 8  # maximal number of root causes of a step, including those shown as "and 3 more"
_INPUTS = 3  # inputs named in a line
_SAME_LABEL, _SAME_CONFIG, _NEWEST = 8, 4, 4  # number of earlier outputs to compare, by kind


class _Outputs:
    """The readable outputs of one step function, indexed to find similar ones."""

    def __init__(self, found: dict[str, Manifest]) -> None:
        self._newest = sorted(found.items(), key=lambda item: -item[1].started)
        self._by_label: dict[str, list[tuple[str, Manifest]]] = {}
        self._by_config: dict[str, list[tuple[str, Manifest]]] = {}
        for item in self._newest:
            self._by_label.setdefault(item[1].label, []).append(item)
            self._by_config.setdefault(fingerprint.digest(item[1].config), []).append(item)

    def like(self, node: Node) -> dict[str, Manifest]:
        """A few outputs that the node may be a changed version of, by directory."""
        config = fingerprint.digest(node.identity.config)
        return dict(
            [
                *self._by_label.get(node.label, [])[:_SAME_LABEL],
                *self._by_config.get(config, [])[:_SAME_CONFIG],
                *self._newest[:_NEWEST],
            ]
        )


class ChangeLog:
    """Compares the steps of one graph, inputs first, with earlier outputs; by several threads."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._loading = threading.Lock()
        self._names: dict[str, list[str]] | None = None
        self._outputs: dict[str, _Outputs] = {}
        self._roots: dict[str, list[str]] = {}

    def because(self, node: Node, causes: Iterable[str]) -> None:
        self._roots[node.key] = [f"{node.label}: {cause}" for cause in causes]

    def explain(self, node: Node) -> tuple[str, list[str]]:
        """(directory of the most similar earlier output, differences from it), or ("", []).

        The node's inputs must have been explained before.
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
        """Differences from the output `old` to the node, one line per field and per root cause."""
        lines = fingerprint.difference(old.config, node.identity.config)
        if old.version != node.step.version:
            lines.append(f"version: {old.version} -> {node.step.version}")
        changed: dict[str, list[str]] = {}
        for name in sorted({*old.inputs, *node.inputs}):
            new = node.inputs.get(name)
            if name not in old.inputs or new is None:
                lines.append(f"input {name}: {'added' if new is not None else 'removed'}")
            elif old.inputs[name]["key"] != new.key:
                first, *more = self._roots.get(new.key) or [""]
                causes = f" ({first}{f' and {len(more)} more' if more else ''})" if first else ""
                changed.setdefault(causes, []).append(name)
        for causes, names in changed.items():
            more = f" and {len(names) - _INPUTS} more" if len(names) > _INPUTS else ""
            lines.append(f"input {', '.join(names[:_INPUTS])}{more} changed{causes}")
        return lines

    def _outputs_of(self, step: str) -> _Outputs:
        with self._loading:
            if self._names is None:
                self._names = {}
                for name in self._store.outputs():
                    self._names.setdefault(name.rpartition("-")[0], []).append(name)
            if step not in self._outputs:
                prefix, names = self._store.prefix, self._names.get(step, [])
                found = by_item(lambda n: readable(storage.join(prefix, n)), names, prefix)
                self._outputs[step] = _Outputs({n: m for n, m in found.items() if m is not None})
            return self._outputs[step]
