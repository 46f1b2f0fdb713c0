"""Where the boxes of a graph stand: columns by the longest way from a source, few crossings.

The usual four steps for layered graphs (Sugiyama et al. 1981): a column per layer; a way point in
every column that an edge passes; columns sorted by the mean place of their neighbours; heights
that keep each box near its neighbours, found exactly by isotonic regression.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

ARROW_TIP = (
    '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="9" '
    'markerHeight="9" markerUnits="userSpaceOnUse" orient="auto">'
    '<path d="M0 0 8 4 0 8z"/></marker></defs>'
)
"""SVG definition of the arrow that edges end in: `url(#tip)`."""

_SWEEPS = 6
_LANE = 14.0  # height given to an edge that passes a column

Point = tuple[float, float]
# A place in a column: a node's name, or the edge (parent, child) that passes this column.
Spot: TypeAlias = "str | tuple[str, str, int]"


@dataclass(frozen=True)
class Box:
    """Size of every box and the gaps between boxes, in pixels."""

    width: float = 168
    height: float = 54
    gap_x: float = 56
    gap_y: float = 22
    margin: float = 8


@dataclass(frozen=True)
class Layout:
    """A placed graph.

    Attributes:
        places: top left corner of each box.
        edges: (parent, child) -> SVG path from the parent's right side to the child's left side.
        width, height: of the whole, margins included.
    """

    places: dict[str, Point]
    edges: dict[tuple[str, str], str]
    width: float
    height: float


def columns_of(parents: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Column of each node; `parents` is ordered inputs first, unknown parents count as absent."""
    column: dict[str, int] = {}
    for name, above in parents.items():
        column[name] = 1 + max((column[p] for p in above if p in column), default=-1)
    # A source that is first used late stands beside its user, or its edge would pass everything.
    first_use: dict[str, int] = {}
    for name, above in parents.items():
        for parent in above:
            if column.get(parent, len(column)) < column[name]:
                first_use[parent] = min(first_use.get(parent, column[name]), column[name])
    for name, above in parents.items():
        if name in first_use and not any(p in column for p in above):
            column[name] = first_use[name] - 1
    return column


def layered(parents: Mapping[str, Sequence[str]], box: Box) -> Layout:
    """Place a graph.

    Args:
        parents: node -> the nodes it is made from; ordered so that these come first.
        box: sizes.
    """
    column = columns_of(parents)
    edges = [
        (parent, name)
        for name, above in parents.items()
        for parent in dict.fromkeys(above)
        if parent in column and column[parent] < column[name]
    ]
    order, links = _spots(column, edges)
    _sort(order, links)
    middle = _heights(order, links, box)
    top = min((middle[s] - _height(s, box) / 2 for spots in order for s in spots), default=0.0)
    middle = {spot: y - top + box.margin for spot, y in middle.items()}
    left = [box.margin + i * (box.width + box.gap_x) for i in range(len(order))]
    places = {name: (left[c], middle[name] - box.height / 2) for name, c in column.items()}
    bottom = max((y + _height(s, box) / 2 for s, y in middle.items()), default=0.0)
    return Layout(
        places,
        {edge: _path(edge, column, middle, left, box) for edge in edges},
        width=2 * box.margin + len(order) * (box.width + box.gap_x) - box.gap_x if order else 0,
        height=bottom + box.margin,
    )


def _height(spot: Spot, box: Box) -> float:
    return box.height if isinstance(spot, str) else _LANE


def _spots(
    column: dict[str, int], edges: list[tuple[str, str]]
) -> tuple[list[list[Spot]], dict[Spot, tuple[list[Spot], list[Spot]]]]:
    """Every column's spots, and each spot's neighbours (in the column before, in the next)."""
    order: list[list[Spot]] = [[] for _ in range(1 + max(column.values(), default=-1))]
    links: dict[Spot, tuple[list[Spot], list[Spot]]] = {}
    for name, c in column.items():
        order[c].append(name)
        links[name] = ([], [])
    for parent, child in edges:
        before: Spot = parent
        for c in range(column[parent] + 1, column[child]):
            passing = (parent, child, c)
            order[c].append(passing)
            links[passing] = ([before], [])
            links[before][1].append(passing)
            before = passing
        links[before][1].append(child)
        links[child][0].append(before)
    return order, links


def _sort(order: list[list[Spot]], links: dict[Spot, tuple[list[Spot], list[Spot]]]) -> None:
    """Reorder columns in place so that few edges cross."""
    rank = {spot: float(i) for spots in order for i, spot in enumerate(spots)}
    for sweep in range(_SWEEPS):
        side = sweep % 2
        for spots in order if side == 0 else reversed(order):
            wish = {s: _mean([rank[n] for n in links[s][side]], rank[s]) for s in spots}
            spots.sort(key=wish.__getitem__)
            rank |= {spot: float(i) for i, spot in enumerate(spots)}


def _heights(
    order: list[list[Spot]], links: dict[Spot, tuple[list[Spot], list[Spot]]], box: Box
) -> dict[Spot, float]:
    """Middle of each spot: near its neighbours, in the column's order, without overlap."""
    middle = dict.fromkeys(links, 0.0)
    for sweep in range(_SWEEPS):
        side = sweep % 2
        for spots in order if side == 0 else reversed(order):
            offsets, total = [], 0.0
            for i, spot in enumerate(spots):
                if i:
                    both = _height(spots[i - 1], box) + _height(spot, box)
                    total += both / 2 + box.gap_y
                offsets.append(total)
            wish = [_mean([middle[n] for n in links[s][side]], middle[s]) for s in spots]
            fitted = _isotonic([w - o for w, o in zip(wish, offsets, strict=True)])
            middle |= {s: f + o for s, f, o in zip(spots, fitted, offsets, strict=True)}
    return middle


def _mean(values: list[float], default: float) -> float:
    return sum(values) / len(values) if values else default


def _isotonic(values: list[float]) -> list[float]:
    """The nondecreasing sequence nearest to `values` in squares (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []
    for value in values:
        total, count = value, 1
        while pools and pools[-1][0] / pools[-1][1] > total / count:
            more, number = pools.pop()
            total, count = total + more, count + number
        pools.append((total, count))
    return [total / count for total, count in pools for _ in range(count)]


def _path(
    edge: tuple[str, str],
    column: dict[str, int],
    middle: dict[Spot, float],
    left: list[float],
    box: Box,
) -> str:
    parent, child = edge
    passed = [((*edge, c), c) for c in range(column[parent] + 1, column[child])]
    points = [(left[column[parent]] + box.width, middle[parent])]
    for spot, c in passed:
        points += [(left[c], middle[spot]), (left[c] + box.width, middle[spot])]
    points.append((left[column[child]], middle[child]))
    return curve(points)


def curve(points: Sequence[Point]) -> str:
    """An SVG path: a level curve from each even point to the next, a line across boxes."""
    path = f"M{points[0][0]:.0f} {points[0][1]:.1f}"
    for i, ((x1, y1), (x2, y2)) in enumerate(itertools.pairwise(points)):
        bend = (x1 + x2) / 2
        level = i % 2
        path += (
            f"H{x2:.0f}" if level else f"C{bend:.0f} {y1:.1f} {bend:.0f} {y2:.1f} {x2:.0f} {y2:.1f}"
        )
    return path
