"""Where boxes stand: apart, inputs to the left, no edge through a box, few crossings."""

from __future__ import annotations

import itertools
import random
import re
from xml.etree import ElementTree

import pytest

from pipeline.pages.layout import Box, columns_of, layered
from pipeline.plan import lineage
from pipeline.store import storage
from tests.pipeline import helpers, toy
from tests.pipeline.pages.pages import overlaps

BOX = Box()


def random_graph(seed):
    """Up to 40 nodes, each with up to three inputs among the earlier ones."""
    draw = random.Random(seed)
    names = [f"n{i}" for i in range(draw.randrange(1, 41))]
    return {name: draw.sample(names[:i], min(i, draw.randrange(4))) for i, name in enumerate(names)}


def corners(path):
    """(start, end) of every straight or curved piece of an SVG path of M, C and H."""
    pieces, at = [], None
    for letter, numbers in re.findall(r"([MCH])([-\d. ]+)", path):
        values = [float(v) for v in numbers.split()]
        end = (values[0], at[1]) if letter == "H" else tuple(values[-2:])
        if letter != "M":
            pieces.append((letter, at, end))
        at = end
    return pieces


@pytest.mark.parametrize("seed", range(25))
def test_random_graphs_are_drawn_cleanly(seed):
    """Boxes apart and inside; an edge leaves its parent, meets its child, crosses no box."""
    parents = random_graph(seed)
    layout = layered(parents, BOX)
    boxes = {name: (x, y, BOX.width, BOX.height) for name, (x, y) in layout.places.items()}
    assert boxes.keys() == parents.keys()
    assert overlaps(list(boxes.values())) == []
    assert all(x >= 0 and y >= 0 for x, y, _, _ in boxes.values())
    assert all(x + w <= layout.width and y + h <= layout.height for x, y, w, h in boxes.values())
    assert set(layout.edges) == {(p, name) for name, above in parents.items() for p in above}
    for (parent, child), path in layout.edges.items():
        pieces = corners(path)
        (px, py, w, h), (cx, cy, _, _) = boxes[parent], boxes[child]
        assert pieces[0][1] == pytest.approx((px + w, py + h / 2), abs=0.51)
        assert pieces[-1][2] == pytest.approx((cx, cy + h / 2), abs=0.51)
        for letter, (x1, y1), (x2, y2) in pieces:
            assert x2 > x1
            if letter == "H":
                # A curve stays in the gap between columns; only a line passes a column.
                line = (x1, min(y1, y2), x2 - x1, 0.1)
                assert not any(overlaps([line, box]) for box in boxes.values())
            else:
                assert x2 - x1 == pytest.approx(BOX.gap_x, abs=1.01)


def test_a_ladder_is_drawn_without_crossings():
    """Two chains side by side, declared crosswise, come out as two straight lines."""
    parents = {"a0": [], "b0": [], "b1": ["b0"], "a1": ["a0"], "a2": ["a1"], "b2": ["b1"]}
    layout = layered(parents, BOX)
    heights = {name: y for name, (_, y) in layout.places.items()}
    assert heights["a0"] == heights["a1"] == heights["a2"]
    assert heights["b0"] == heights["b1"] == heights["b2"]


def test_a_late_source_stands_beside_its_user():
    """So that its edge does not pass the whole drawing; absent and later parents count as none."""
    parents = {"a": [], "late": [], "b": ["a"], "c": ["b", "late"], "d": ["gone", "e"], "e": []}
    assert columns_of(parents) == {"a": 0, "late": 1, "b": 1, "c": 2, "d": 0, "e": 0}
    layout = layered(parents, BOX)
    assert set(layout.edges) == {("a", "b"), ("b", "c"), ("late", "c")}
    assert layered({}, BOX).edges == {}


def test_the_same_graph_gives_the_same_drawing():
    """No set's order, no chance."""
    for seed in range(3):
        assert layered(random_graph(seed), BOX) == layered(random_graph(seed), BOX)


def test_the_lineage_is_drawn_even_when_an_input_is_gone(tmp_path):
    """A box per manifest that is there; well-formed."""
    numbers = toy.numbers(count=4)
    wanted = toy.total(numbers, toy.scaled(numbers, scale=toy.Scale(2)))
    done = helpers.bring_up(str(tmp_path), wanted)
    paths = [done.published[node.key].path for node in done.executed]
    path = paths[-1]
    whole = ElementTree.fromstring(lineage.draw(lineage.lineage([path])))
    assert len(whole.findall("g")) == 3
    assert len(whole.findall("path")) == 3
    storage.delete_tree(paths[0])
    rest = ElementTree.fromstring(lineage.draw(lineage.lineage([path])))
    assert len(rest.findall("g")) == 2
    assert len(rest.findall("path")) == 1


def test_the_crossing_check_can_fail():
    """A line through a box is an overlap."""
    pairs = itertools.combinations([(0, 5, 100, 0.1), (40, 0, 10, 10)], 2)
    assert all(overlaps(list(pair)) for pair in pairs)
