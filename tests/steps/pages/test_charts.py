"""The drawing of a chart, and the data with which its script draws it again."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steps.pages.curves import BLUE, Curve, chart, linear_ticks, logarithmic_ticks


def data_of(drawn):
    (data,) = re.findall(r'<script type="application/json">(.*?)</script>', drawn)
    return json.loads(data)


def path(drawn, kind="line"):
    """The coordinates of the one path of a kind."""
    (found,) = re.findall(rf'<path class="{kind}[^>]* d="([^"]*)"', drawn)
    return [tuple(map(float, point.split())) for point in re.findall(r"[ML]([^MLhZ]+)", found)]


def test_what_a_user_named_breaks_out_of_no_chart():
    """Labels of curves and axes, in the legend, the label for readers and the script's data."""
    bad = '</script><b a="1">&amp;'
    drawn = chart([Curve(bad, [1, 2], [1, 2], BLUE), Curve("b", [1], [2], BLUE)], bad, bad)
    tags = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attrs: tags.append(tag)
    parser.feed(drawn)
    assert "b" not in tags
    assert tags.count("script") == 1
    assert (data_of(drawn)["curves"][0]["label"], data_of(drawn)["x"]["label"]) == (bad, bad)


def test_a_curve_runs_through_its_values():
    """From the lower edge to the upper one; with a gap where there is no number."""
    values = [5.0, math.nan, 1.0, 3.0]
    drawn = chart([Curve("a", [0, 1, 2, 3], values, BLUE)], "loss", from_zero="y", reach=10)
    first, third, last = path(drawn)
    assert [first[0], last[0]] == [46, 392]
    assert [first[1], third[1], last[1]] == pytest.approx([101, 175.4, 138.2])  # of 194 to 8
    assert ' d="M46.0 101.0M276.7 175.4L392.0 138.2"' in drawn
    assert data_of(drawn)["curves"][0]["y"] == [5, None, 1, 3]


def test_decades_are_equally_far_apart_on_a_logarithmic_axis():
    """From the lowest positive value to the highest; zero has no place."""
    curve = Curve("a", [0, 1, 10, 100], [1, 1, 2, 3], BLUE, exact=True)
    drawn = chart([curve], "loss", logarithmic="x")
    assert [x for x, _ in path(drawn)] == [46, 219, 392]
    axes = data_of(drawn)
    assert [axes[name]["log"] for name in "xy"] == [True, False]
    assert axes["x"]["logarithmic"]["ends"] == [1, 100]
    assert axes["x"]["linear"]["ends"] == [0, 100]
    assert [at for at, _ in axes["x"]["logarithmic"]["ticks"]] == [1, 2, 5, 10, 20, 50, 100]
    same = data_of(chart([Curve("a", [1, 1.1], [-1, 0], BLUE)], "", logarithmic="xy"))
    assert [same[name]["logarithmic"] for name in "xy"] == [None, None]
    assert [same[name]["log"] for name in "xy"] == [False, False]


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9))
def test_ticks_are_few_round_numbers_in_the_range(low, width):
    """Of equal distances; a logarithmic axis has some too."""
    high = low + width
    ticks = linear_ticks(low, high) if high - low > 1e-6 * abs(low) else [low, high]
    assert 2 <= len(ticks) <= 8
    assert all(low - 1e-6 * width <= tick <= high + 1e-6 * width for tick in ticks)
    if low > 1e-6:
        assert 2 <= len(logarithmic_ticks(low, max(high, 1.5 * low))) <= 9


def test_a_long_noisy_curve_has_its_mean_in_front():
    """The values stay under the pointer, faint; an exact curve is drawn once."""
    x, y = list(range(400)), [float(n % 7) for n in range(400)]
    both = data_of(chart([Curve("a", x, y, BLUE)], ""))["curves"]
    assert [curve["label"] for curve in both] == ["a, each step", "a"]
    assert both[0]["y"] == y
    assert len(data_of(chart([Curve("a", x, y, BLUE, exact=True)], ""))["curves"]) == 1


def test_bands_rules_and_dots_are_drawn():
    """A band is closed, a rule as high as the axes, a dot at each point."""
    curves = [
        Curve("band", [0, 1], [1, 2], BLUE, "band", high=[3, 4]),
        Curve("rule", [0.5], (), BLUE, "rule"),
        Curve("dots", [0, 1], [1, 4], BLUE, "dots"),
    ]
    drawn = chart(curves, "")
    assert [x for x, _ in path(drawn, "band")] == [46, 392, 392, 46]
    assert ' d="M219.0 8V194"' in drawn
    assert path(drawn, "dots") == path(drawn)
