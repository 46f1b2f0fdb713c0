"""One chart: SVG in HTML that stands without a script, and the data of its curves.

With the data `chart.js` shows values under the pointer and changes an axis to logarithms. Colours
are those of the style sheet, for light and dark.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from markupsafe import Markup

_NAMES = ("blue", "amber", "green", "pink", "violet", "olive", "teal", "red")
COLOURS = tuple(f"var(--{name})" for name in _NAMES)
BLUE, GREY, INK = COLOURS[0], "var(--grey)", "var(--ink)"
SMOOTHED_ABOVE = 300
"""A curve with more points is drawn faintly, under its running mean."""
MOST_POINTS = 1000
SPANS = {"x": (46, 392), "y": (194, 8)}
"""Of each axis, where it begins and ends in the SVG, which is 400 wide and 230 high."""


@dataclass(frozen=True)
class Curve:
    """A labelled curve."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    colour: str
    # "dots" are on a line, "points" without one; a "band" is between `y` and `high`, a "rule" is a
    # vertical line at each `x`.
    drawn: Literal["line", "dashed", "dots", "points", "band", "rule"] = "line"
    faint: bool = False  # drawn behind the others
    exact: bool = False  # without noise, so that it is never smoothed
    listed: bool = True  # in the legend
    high: Sequence[float] = ()


def chart(
    curves: Iterable[Curve],
    y_label: str,
    x_label: str = "step",
    *,
    logarithmic: str = "",
    from_zero: str = "",
    reach: float = 0.0,
    clicked: tuple[str, str] = ("", ""),
) -> Markup:
    """Curves over a common axis; empty if no value is finite.

    Args:
        curves: drawn in order, the faint ones first.
        logarithmic: the axes, such as "xy", that begin logarithmic if they can.
        from_zero: the axes whose linear form begins at zero.
        reach: least end of the linear vertical axis, so that small values do not look large.
        clicked: what a click on a value shows: a command, and a link to the page that it writes,
            both with STEP for the value of x; nothing if empty.
    """
    shown = sorted((e for curve in curves for e in _prepared(curve)), key=lambda c: not c.faint)
    data: dict[str, Any] = {}
    for name, label in (("x", x_label), ("y", y_label)):
        ends = ("x",) if name == "x" else ("y", "high")
        values = [v for curve in shown for end in ends for v in getattr(curve, end) if _drawable(v)]
        if not values:
            return Markup()
        scales = _scales(values, name == "x", name in from_zero, reach if name == "y" else 0.0)
        log = name in logarithmic and scales["logarithmic"] is not None
        data[name] = {"label": label, "span": SPANS[name], **scales, "log": log}
    if clicked[0]:
        data["clicked"] = clicked
    data["curves"] = [
        {
            "label": curve.label,
            "colour": curve.colour,
            **{end: [_number(v) for v in getattr(curve, end)] for end in ("x", "y", "high")},
        }
        for curve in shown
    ]
    drawn = Markup("").join(
        Markup('<path class="{}{}" data-curve="{}" style="--c:{}" d="{}"/>').format(
            kind, " faint" * curve.faint, number, curve.colour, _path(data, number, kind)
        )
        for number, curve in enumerate(shown)
        for kind in (("line", "dots") if curve.drawn == "dots" else (curve.drawn,))
    )
    ticks = Markup("").join(
        Markup('<g class="{}">{}</g>').format(n, _ticks(data[n], n)) for n in "xy"
    )
    said = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    listed = dict.fromkeys(
        (curve.label, curve.colour)
        for curve in sorted(shown, key=lambda c: c.faint)
        if curve.listed
    )
    return Markup(
        '<div class="chart"><p class="legend"><span class="soft">{}</span>{}</p>'
        '<div class="plot"><svg viewBox="0 0 400 230" role="img" aria-label="{} by {}">{}{}'
        '<text class="what" x="392" y="226">{}</text></svg>'
        '<output></output></div><script type="application/json">{}</script></div>'
    ).format(
        y_label,
        legend(listed) if len(listed) > 1 else "",
        *(y_label, x_label, ticks, drawn, x_label, Markup(said)),
    )


def legend(listed: Iterable[tuple[str, str]]) -> Markup:
    """Labels beside their colours."""
    return Markup("").join(
        Markup('<span><i style="--c:{}"></i>{}</span>').format(colour, label)
        for label, colour in listed
    )


def _prepared(curve: Curve) -> list[Curve]:
    """The curve with few points; a long one with noise as a faint curve and its running mean."""
    x, y = thinned(curve.x, curve.y) if curve.y else (list(curve.x), [])
    drawn = replace(curve, x=x, y=y)
    if curve.drawn != "line" or curve.faint or curve.exact or len(curve.y) <= SMOOTHED_ABOVE:
        return [drawn]
    x, y = thinned(curve.x, smoothed(curve.y))
    each = replace(drawn, label=f"{curve.label}, each step", faint=True, listed=False)
    return [each, replace(curve, x=x, y=y, exact=True)]


def _scales(values: Sequence[float], whole: bool, from_zero: bool, reach: float) -> dict[str, Any]:
    """The linear and, for values of one sign and different sizes, the logarithmic scale."""
    low, high = min(values), max(values)
    margin = 0.0 if whole else 0.04 * (high - low) or 0.04 * abs(high) or 1.0
    ends = (
        (min(low, 0.0), max(high + margin, reach)) if from_zero else (low - margin, high + margin)
    )
    if ends[0] == ends[1]:
        ends = (ends[0] - 1.0, ends[1] + 1.0)
    scales: dict[str, Any] = {
        "linear": _scale(*ends, linear_ticks(*ends, whole and ends[1] - ends[0] > 1)),
        "logarithmic": None,
    }
    positive = [value for value in values if value > 0]
    if low >= 0 and positive and high > 1.5 * min(positive):
        ends = (min(positive), high)
        if not whole:
            ends = (ends[0] / 1.05, ends[1] * 1.05)
        scales["logarithmic"] = _scale(*ends, logarithmic_ticks(*ends))
    return scales


def _scale(low: float, high: float, ticks: Sequence[float]) -> dict[str, Any]:
    return {"ends": [low, high], "ticks": [[_number(each), readable(each)] for each in ticks]}


def linear_ticks(low: float, high: float, whole: bool = False) -> list[float]:
    """At most eight round numbers of equal distances; `whole` numbers if asked."""
    size = 10.0 ** math.floor(math.log10((high - low) / 7))
    every = next(n * size for n in (1, 2, 5, 10) if 7 * n * size >= high - low)
    every = max(every, 1.0) if whole else every
    first, last = math.ceil(low / every - 1e-9), math.floor(high / every + 1e-9)
    return [every * number for number in range(first, last + 1)]


def logarithmic_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 of every decade, powers of ten of a long range, round numbers of a short one."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = -(-(last - first) // 7)
    for leading in ((1, 2, 5), (1,)):
        powers = range(first, last + 1, every)
        found = [v for p in powers for n in leading if low <= (v := float(f"{n}e{p}")) <= high]
        if len(found) <= 9:
            break
    return found if len(found) > 2 else linear_ticks(low, high)


def _drawable(value: float) -> bool:
    return abs(value) < 1e300  # False of NaN too; the span of larger ones is infinite


def _number(value: float) -> float | None:
    """With seven digits; JSON has no NaN."""
    if not _drawable(value):
        return None
    return int(value) if value == int(value) and abs(value) < 1e15 else float(f"{value:.7g}")


def _place(axis: Mapping[str, Any], value: float | None) -> float:
    """Where the SVG has a value; NaN if nowhere."""
    (begin, end), change = axis["span"], math.log if axis["log"] else float
    if value is None or (axis["log"] and value <= 0):
        return math.nan
    low, high = map(change, axis["logarithmic" if axis["log"] else "linear"]["ends"])
    return begin + (end - begin) * (change(value) - low) / (high - low)


def _path(data: Mapping[str, Any], number: int, kind: str) -> str:
    """As `path` of `chart.js`."""
    curve = data["curves"][number]

    def points(name: str) -> list[tuple[float, float]]:
        pairs = zip(curve["x"], curve[name], strict=True)
        return [(_place(data["x"], x), _place(data["y"], y)) for x, y in pairs]

    if kind == "rule":
        places = [_place(data["x"], x) for x in curve["x"]]
        return "".join(f"M{at:.1f} 8V194" for at in places if math.isfinite(at))
    if kind == "band":
        way = [*points("y"), *reversed(points("high"))]
        return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in way if math.isfinite(x + y)) + "Z"
    text, pen = "", "M"
    for x, y in points("y"):
        there = math.isfinite(x + y)
        text += (
            f"M{x:.1f} {y:.1f}h0" if kind in ("dots", "points") else f"{pen}{x:.1f} {y:.1f}"
        ) * there
        pen = "L" if there else "M"
    return text


def _ticks(axis: Mapping[str, Any], name: str) -> Markup:
    """As `ticks` of `chart.js`."""
    one = {
        "x": '<path d="M{0:.1f} 8V194"/><text x="{0:.1f}" y="209">{1}</text>',
        "y": '<path d="M46 {0:.1f}H392"/><text x="41" y="{0:.1f}" dy=".35em">{1}</text>',
    }[name]
    ticks = axis["logarithmic" if axis["log"] else "linear"]["ticks"]
    return Markup("").join(Markup(one).format(_place(axis, at), text) for at, text in ticks)


def thinned(
    x: Sequence[float], y: Sequence[float], most: int = MOST_POINTS
) -> tuple[list[float], list[float]]:
    """At most `most` points that look the same: the minimum and the maximum of every interval."""
    if len(y) <= most:
        return list(x), list(y)
    width = -(-2 * len(y) // most)
    kept: list[int] = []
    for begin in range(0, len(y), width):
        stretch = [i for i in range(begin, min(begin + width, len(y))) if math.isfinite(y[i])]
        if stretch:
            ends = {min(stretch, key=lambda i: y[i]), max(stretch, key=lambda i: y[i])}
            kept += sorted(ends)
    return [x[i] for i in kept], [y[i] for i in kept]


def smoothed(values: Sequence[float], share: float = 0.02) -> list[float]:
    """Centred running mean over a `share` of all points, without points that are not finite."""
    import numpy as np

    finite = np.isfinite(values)
    around = np.ones(2 * max(1, round(share * len(values) / 2)) + 1)
    counts = np.convolve(finite, around, "same")
    sums = np.convolve(np.where(finite, values, 0.0), around, "same")
    return np.where(counts > 0, sums / np.maximum(counts, 1), math.nan).tolist()


def readable(value: float) -> str:
    """A number for an axis: 12k, 3.5M, 0.02, 2e+18."""
    if abs(value) >= 1e15:
        return f"{value:.3g}"
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.6g}{letter}"
    return f"{value:.6g}"
