"""Everything an output was made from, read from manifests; and a picture of it."""

from __future__ import annotations

import html
from dataclasses import dataclass

from pipeline import storage
from pipeline.manifest import Manifest, load

_WIDTH, _HEIGHT, _GAP_X, _GAP_Y, _MARGIN = 168, 54, 56, 22, 8


@dataclass(frozen=True)
class Ancestor:
    """One published output of a lineage: its directory's name and its manifest."""

    directory: str
    manifest: Manifest

    @property
    def parents(self) -> list[str]:
        """Directories of the outputs it read."""
        return [reference["directory"] for reference in self.manifest.inputs.values()]


def lineage(paths: list[str]) -> list[Ancestor]:
    """The outputs at `paths` and everything they were made from, inputs first, each once."""
    found: dict[str, Ancestor] = {}

    def visit(path: str) -> None:
        prefix, _, directory = path.rpartition("/")
        manifest = load(path)
        if directory in found or manifest is None:
            return
        ancestor = Ancestor(directory, manifest)
        for parent in ancestor.parents:
            visit(storage.join(prefix, parent))
        found[directory] = ancestor

    for path in paths:
        visit(path)
    return list(found.values())


def draw(ancestors: list[Ancestor]) -> str:
    """The lineage as an SVG: a box per step with its time and size, an arrow per input.

    Boxes stand in columns by the longest way from a source.
    """
    column: dict[str, int] = {}
    for ancestor in ancestors:
        column[ancestor.directory] = 1 + max((column[p] for p in ancestor.parents), default=-1)
    places: dict[str, tuple[int, int]] = {}
    rows: dict[int, int] = {}
    for ancestor in ancestors:
        x = column[ancestor.directory]
        y = rows.get(x, 0)
        rows[x] = y + 1
        places[ancestor.directory] = (
            _MARGIN + x * (_WIDTH + _GAP_X),
            _MARGIN + y * (_HEIGHT + _GAP_Y),
        )
    width = 2 * _MARGIN + (max(column.values()) + 1) * (_WIDTH + _GAP_X) - _GAP_X
    height = 2 * _MARGIN + max(rows.values()) * (_HEIGHT + _GAP_Y) - _GAP_Y
    arrows = [
        _arrow(places[parent], places[ancestor.directory])
        for ancestor in ancestors
        for parent in ancestor.parents
    ]
    boxes = [_box(ancestor, *places[ancestor.directory]) for ancestor in ancestors]
    return (
        f'<svg class="dag" viewBox="0 0 {width} {height}" style="max-width:{width}px" '
        'role="img" aria-label="graph of steps">'
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0 8 4 0 8z"/></marker></defs>'
        + "".join(arrows + boxes)
        + "</svg>"
    )


def _arrow(start: tuple[int, int], end: tuple[int, int]) -> str:
    x1, y1 = start[0] + _WIDTH, start[1] + _HEIGHT / 2
    x2, y2 = end[0], end[1] + _HEIGHT / 2
    bend = (x2 - x1) / 2
    path = f"M{x1} {y1}C{x1 + bend} {y1} {x2 - bend} {y2} {x2} {y2}"
    return f'<path class="edge" d="{path}" marker-end="url(#tip)"/>'


def _box(ancestor: Ancestor, x: int, y: int) -> str:
    manifest = ancestor.manifest
    size = sum(shard.bytes for shard in manifest.shards)
    details = f"{manifest.seconds:.1f} s" + (f", {size / 1e6:,.1f} MB" if size else "")
    return (
        f'<g transform="translate({x} {y})"><title>{html.escape(ancestor.directory)}</title>'
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" rx="8"/>'
        f'<text x="12" y="23" class="name">{html.escape(manifest.label)}</text>'
        f'<text x="12" y="42" class="small">{html.escape(details)}</text></g>'
    )
