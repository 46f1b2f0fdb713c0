"""A layered drawing of a graph of steps: inputs above, a box per step, a curve per input."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

MOST_BOXES = 60
_HEIGHT, _GAP_X, _GAP_Y, _MARGIN = 46.0, 18.0, 30.0, 4.0


@dataclass(frozen=True)
class Box:
    """One step: its key, two lines of text, a class of the style sheet, keys of its inputs."""

    key: str
    title: str
    text: str = ""
    kind: str = ""
    parents: Sequence[str] = ()

    @property
    def width(self) -> float:
        return max(7.9 * len(self.title), 6.9 * len(self.text), 90.0) + 24


@dataclass(frozen=True)
class Drawing:
    """Boxes with their upper left corners, and the paths of the edges."""

    width: float
    height: float
    boxes: list[tuple[Box, float, float]]
    edges: list[str]


def draw(boxes: Sequence[Box]) -> Drawing | None:
    """Boxes in layers by the longest path from a source; None for none or over `MOST_BOXES`."""
    if not 0 < len(boxes) <= MOST_BOXES:
        return None
    layer: dict[str, int] = {}
    rows: list[list[str]] = []
    above: dict[str, list[str]] = {}  # slot -> its connected slots in the layer above
    links: list[list[str]] = []

    def place(slot: str, number: int) -> None:
        rows.extend([] for _ in range(number + 1 - len(rows)))
        rows[number].append(slot)
        above[slot] = []

    for box in boxes:
        parents = [key for key in dict.fromkeys(box.parents) if key in layer]
        number = layer[box.key] = max((layer[key] + 1 for key in parents), default=0)
        place(box.key, number)
        for parent in parents:
            # An edge across layers takes a dummy slot in each, so that no box covers it.
            link = [parent]
            for between in range(layer[parent] + 1, number):
                slot = f"{parent}\n{box.key}\n{between}"
                place(slot, between)
                above[slot].append(link[-1])
                link.append(slot)
            above[box.key].append(link[-1])
            links.append([*link, box.key])
    known = {box.key: box for box in boxes}
    widths = {slot: known[slot].width if slot in known else 10.0 for slot in above}
    total = max(sum(widths[slot] + _GAP_X for slot in row) for row in rows) - _GAP_X
    places = _columns(rows, above, widths, total)
    tops = {slot: i * (_HEIGHT + _GAP_Y) + _MARGIN for i, row in enumerate(rows) for slot in row}
    edges = []
    for link in links:
        path = f"M{places[link[0]]:.1f} {tops[link[0]] + _HEIGHT:.1f}"
        for start, end in itertools.pairwise(link):
            y, z = tops[start] + _HEIGHT, tops[end]
            half, x = (y + z) / 2, places[end]
            # A cubic Bezier curve, vertical at both ends; it crosses a dummy slot straight down.
            path += f"C{places[start]:.1f} {half:.1f} {x:.1f} {half:.1f} {x:.1f} {z:.1f}"
            if end not in known:
                path += f"V{z + _HEIGHT:.1f}"
        edges.append(path)
    corners = [(box, places[box.key] - box.width / 2, tops[box.key]) for box in boxes]
    height = len(rows) * (_HEIGHT + _GAP_Y) - _GAP_Y + 2 * _MARGIN
    return Drawing(total + 2 * _MARGIN, height, corners, edges)


def _columns(
    rows: list[list[str]], above: dict[str, list[str]], widths: dict[str, float], total: float
) -> dict[str, float]:
    """The middle x of every slot; each row is centered and sorted by the mean x of its parents."""
    middle: dict[str, float] = {}
    for row in rows:
        wanted = {
            slot: sum(middle[p] for p in above[slot]) / len(above[slot]) if above[slot] else 0.0
            for slot in row
        }
        row.sort(key=wanted.__getitem__)
        left = (total - sum(widths[slot] + _GAP_X for slot in row) + _GAP_X) / 2 + _MARGIN
        for slot in row:
            middle[slot] = left + widths[slot] / 2
            left += widths[slot] + _GAP_X
    return middle
