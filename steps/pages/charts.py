"""Charts of training runs as inline SVG, drawn with matplotlib.

A chart of one run has a colour per curve, a chart of several runs a colour per run. Legends are
above the axes, where they hide no curve. The page's style sheet colours the text.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.pages.readable import duration
from steps.pages.run_record import RunRecord

if TYPE_CHECKING:
    from training.metrics.goodput import Account

INK, FAINT = "#64748b", "#7b8794"
BLUE, ORANGE, GREEN = "#3182ce", "#dd6b20", "#38a169"
COLOURS = (BLUE, ORANGE, GREEN, "#d53f8c", "#b7791f", "#319795", "#9f7aea", "#e53e3e")
"""Distinct on white and on dark grey, and mostly with colour blindness too."""
SMOOTHED_ABOVE = 300
"""A curve with more points is drawn faintly, under its running mean."""
MOST_POINTS = 2000
Rows = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Curve:
    """A labelled curve.

    Attributes:
        marked: whether to draw dots without smoothing, for few points such as evaluations.
        faint: whether to draw it behind the others and without a label.
        exact: whether it has no noise, so that it is never smoothed.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    colour: str
    marked: bool = False
    faint: bool = False
    exact: bool = False
    dashed: bool = False


_STYLE: dict[str, Any] = {
    **{"svg.hashsalt": "ponente", "svg.fonttype": "none", "font.size": 9, "text.color": INK},
    **{"axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": FAINT},
    **{"axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK, "axes.xmargin": 0.02},
    **{"axes.grid": True, "grid.color": FAINT, "grid.alpha": 0.25, "grid.linewidth": 0.6},
    **{"axes.axisbelow": True, "legend.frameon": False, "legend.borderaxespad": 0.2},
    **{"legend.handlelength": 1.4, "legend.columnspacing": 1.2},
}
# The fixed salt makes ids in the file deterministic, so equal data gives equal bytes.


def figure(
    draw: Callable[[Any], None],
    y_label: str,
    x_label: str = "step",
    size: tuple[float, float] = (6.4, 3.3),
) -> str:
    """The SVG of one pair of axes, on which `draw` draws."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        drawing = Figure(figsize=size, layout="constrained")
        axes = drawing.subplots()
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        draw(axes)
        buffer = io.StringIO()
        drawing.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def legend_above(axes: Any) -> None:
    """Add a legend outside the axes, above their upper edge."""
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=4)


def chart(
    curves: Sequence[Curve],
    y_label: str,
    *,
    logarithmic: bool = False,
    from_zero: bool = False,
    reach: float = 0.0,
    restarts: Sequence[float] = (),
) -> str:
    """The SVG of curves over a common axis; empty if no value is finite.

    Args:
        curves: drawn in order; without a legend if all have the same label.
        logarithmic: use a logarithmic vertical axis if values differ by a factor of ten or more.
        reach: least end of an axis from zero, so that small values do not look large.
        restarts: steps at which the run resumed from a checkpoint, drawn as faint vertical lines.
    """
    if not any(math.isfinite(value) for curve in curves for value in curve.y):
        return ""

    def draw(axes: Any) -> None:
        for curve in curves:
            _draw(axes, curve)
        for number, step in enumerate(restarts):
            label = None if number else "restart"
            axes.axvline(step, color=FAINT, linestyle=":", linewidth=1, zorder=0, label=label)
        if logarithmic and _decades(curves) >= 1:
            axes.set_yscale("log")
        elif from_zero:
            axes.set_ylim(0, max(reach, axes.get_ylim()[1]))
        axes.locator_params("x", nbins=8, integer=True)
        axes.yaxis.set_major_formatter(lambda value, _: readable(value))
        axes.xaxis.set_major_formatter(lambda value, _: readable(value))
        if len({curve.label for curve in curves}) > 1 or restarts:
            legend_above(axes)

    return figure(draw, y_label)


def _decades(curves: Sequence[Curve]) -> float:
    values = [value for curve in curves for value in curve.y if 0 < value < math.inf]
    return math.log10(max(values) / min(values)) if values else 0.0


def _draw(axes: Any, curve: Curve) -> None:
    style: dict[str, Any] = {"color": curve.colour, "label": curve.label}
    style["linestyle"] = "--" if curve.dashed else "-"
    if curve.marked:
        axes.plot(curve.x, curve.y, marker="o", markersize=3.5, linewidth=1.4, **style)
        return
    raw = thinned(curve.x, curve.y)
    if curve.faint:
        axes.plot(*raw, linewidth=0.9, **{**style, "label": None}, alpha=0.6)
    elif len(curve.y) > SMOOTHED_ABOVE and not curve.exact:
        axes.plot(*raw, linewidth=0.7, **{**style, "label": None}, alpha=0.55)
        axes.plot(*thinned(curve.x, smoothed(curve.y)), linewidth=1.3, **style)
    else:
        axes.plot(*raw, linewidth=1.1, **style)


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
    """A number for an axis: 12k, 3.5M, 0.02."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.6g}{letter}"
    return f"{value:.6g}"


@dataclass(frozen=True)
class Panel:
    """One chart of the history.

    Attributes:
        columns: labels of the columns; comparisons of runs draw the first column only.
        faint: columns drawn behind the others.
        reach: see `chart`.
    """

    caption: str
    y_label: str
    columns: Mapping[str, str]
    scale: float = 1.0
    exact: bool = True
    faint: tuple[str, ...] = ()
    logarithmic: bool = False
    from_zero: bool = True
    reach: float = 0.0

    def of_run(self, run: RunRecord) -> str:
        """The SVG of one run's columns; empty if it has none of them."""
        curves = [
            curve
            for (name, label), colour in zip(self.columns.items(), COLOURS, strict=False)
            for curve in self._curves(run, name, label or self.caption, colour)
        ]
        return self._draw(curves)

    def of_runs(self, runs: Sequence[RunRecord]) -> str:
        """The SVG of the first column of several runs."""
        name = next(iter(self.columns))
        pairs = zip(runs, _cycle(len(runs)), strict=True)
        return self._draw([c for run, x in pairs for c in self._curves(run, name, run.name, x)])

    def _curves(self, run: RunRecord, name: str, label: str, colour: str) -> list[Curve]:
        x, y = column(run.history, "step"), column(run.history, name, self.scale)
        faint = name in self.faint
        shown = any(map(math.isfinite, y))
        if name.startswith("useful_"):
            shown &= any(row.get("padded") for row in run.history)
        return [Curve(label, x, y, colour, faint=faint, exact=self.exact)] if shown else []

    def _draw(self, curves: Sequence[Curve]) -> str:
        return chart(
            curves,
            self.y_label,
            logarithmic=self.logarithmic,
            from_zero=self.from_zero,
            reach=self.reach,
        )


_LOSS = Panel("Training loss", "loss, nats per token", {"loss": ""}, exact=False, from_zero=False)
PANELS = (
    Panel("Learning rate", "learning rate", {"learning_rate": ""}),
    Panel(
        "Gradient norm, before clipping",
        "2-norm",
        {"grad_norm": ""},
        exact=False,
        logarithmic=True,
        from_zero=False,
    ),
    Panel("Parameter norm", "2-norm", {"parameter_norm": ""}, from_zero=False),
    Panel(
        "Throughput",
        "tokens per second",
        {
            "tokens_per_second_average": "average of 50 steps",
            "useful_tokens_per_second": "without padding, each step",
            "tokens_per_second": "each step",
        },
        faint=("tokens_per_second", "useful_tokens_per_second"),
    ),
    Panel(
        "Utilisation",
        "% of the devices' peak",
        {"mfu": "MFU, causal", "mfu_full": "MFU, full attention", "hfu": "HFU"},
        scale=100.0,
    ),
    Panel(
        "Waiting for data",
        "% of the step's time",
        {"data_wait": ""},
        scale=100.0,
        exact=False,
        reach=5.0,
    ),
    Panel("Peak memory", "GiB", {"memory_bytes": ""}, scale=2.0**-30),
)


def column(rows: Rows, name: str, scale: float = 1.0) -> list[float]:
    """One number per row, NaN if the row has none; `data_wait` as a share of the step's time."""

    def number(row: Mapping[str, Any]) -> float:
        value = row.get(name)
        if name == "data_wait" and value is not None:
            value = value / row["seconds"] if row.get("seconds") else None
        return math.nan if value is None else scale * float(value)

    return [number(row) for row in rows]


def _cycle(count: int) -> list[str]:
    return [COLOURS[index % len(COLOURS)] for index in range(count)]


def loss_chart(run: RunRecord, restarts: Sequence[float] = ()) -> str:
    """Loss on training data and on every held-out split by step, with the unigram entropy."""
    steps = column(run.history, "step")
    curves = [Curve("training", steps, column(run.history, "loss"), BLUE)] if steps else []
    for name, colour in zip(run.splits, _cycle(len(run.splits) + 1)[1:], strict=True):
        rows = run.scores(name)
        curves.append(Curve(name, column(rows, "step"), column(rows, "loss"), colour, marked=True))
    ends = [value for curve in curves for value in (curve.x[0], curve.x[-1]) if curve.x]
    if run.entropy is not None and ends:
        level = f"unigram entropy {run.entropy:.2f}"
        x, y = [min(ends), max(ends)], [run.entropy] * 2
        curves.append(Curve(level, x, y, FAINT, dashed=True))
    return chart(curves, "loss, nats per token", restarts=restarts)


def overlaid(runs: Sequence[RunRecord]) -> list[tuple[str, str]]:
    """(caption, SVG) of every metric of several runs, with a colour per run."""
    captioned = []
    for name in dict.fromkeys(name for run in runs for name in run.splits):
        curves = []
        for run, colour in zip(runs, _cycle(len(runs)), strict=True):
            x, y = (column(run.scores(name), each) for each in ("step", "loss"))
            curves.append(Curve(run.name, x, y, colour, marked=True))
        captioned.append((f"Loss on {name}", chart(curves, "loss, nats per token")))
    return captioned + [(panel.caption, panel.of_runs(runs)) for panel in (_LOSS, *PANELS)]


PARTS = {
    "init": ("init", "#9f7aea"),
    "compile": ("compile", "#b7791f"),
    "data_wait": ("data wait", ORANGE),
    "evaluation": ("evaluation", BLUE),
    "checkpoint": ("checkpoint", "#319795"),
    "samples": ("samples", "#d53f8c"),
    "other": ("other", FAINT),
    "skipped": ("steps not applied", "#7f8a3a"),
    "redone": ("lost: done again", "#e53e3e"),
    "dead": ("lost: dead time", "#bf4a4a"),
    "step": ("training steps", GREEN),
}
"""Name and colour of every part of an account of the wall time."""


def unit_of(seconds: float) -> tuple[float, str]:
    """(seconds, name) of the time unit of an axis that ends at `seconds`."""
    for size, name in ((86_400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 2 * size:
            return size, name
    return 1.0, "seconds"


def waterfall_chart(account: Account) -> str:
    """A waterfall from the total wall time to the training steps, with a bar for every part."""
    size, unit = unit_of(account.total)
    bars, left = [("total", 0.0, account.total, FAINT)], account.total
    for part, (name, colour) in PARTS.items():
        seconds = account.parts[part]
        if part == "step":
            bars.append((name, 0.0, seconds, colour))
        elif seconds > 0.0005 * account.total:
            left -= seconds
            bars.append((name, left, seconds, colour))

    def draw(axes: Any) -> None:
        for row, (_, start, width, colour) in enumerate(bars):
            axes.barh(row, width / size, left=start / size, color=colour, height=0.68)
            share = f" {duration(width)}, {width / (account.total or 1.0):.1%} "
            end = start + width
            # Right of the bar if the text fits there, else left of it.
            right = end <= 0.99 * account.total or start < 0.3 * account.total
            x, side = (end, "left") if right else (start, "right")
            axes.text(x / size, row, share, va="center", ha=side, fontsize=8)
        _rows(axes, [name for name, *_ in bars], 1.22 * account.total / size)

    return figure(draw, "", f"wall time, {unit}", (6.4, 0.8 + 0.27 * len(bars)))


def bars_chart(runs: Sequence[tuple[str, Account]]) -> str:
    """A stacked bar per run, with the parts of its wall time in per cent."""
    shown = [n for n in PARTS if any(a.parts[n] > 0.001 * a.total for _, a in runs)]

    def draw(axes: Any) -> None:
        lefts = [0.0] * len(runs)
        for part in reversed(shown):
            name, colour = PARTS[part]
            widths = [100 * a.parts[part] / (a.total or 1.0) for _, a in runs]
            axes.barh(range(len(runs)), widths, left=lefts, color=colour, height=0.6, label=name)
            lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
        _rows(axes, [name for name, _ in runs], 100)
        legend_above(axes)

    return figure(draw, "", "% of the wall time", (6.4, 1.5 + 0.32 * len(runs)))


def _rows(axes: Any, names: Sequence[str], end: float) -> None:
    """Label horizontal bars, with the first one on top."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(0, end or 1.0)
    axes.grid(visible=False, axis="y")
