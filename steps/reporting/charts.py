"""Curves of training runs as inline SVG, drawn with matplotlib; viewing fetches nothing.

A chart takes one run or several: with one, every curve has a colour; with several, every run has.
Legends stand above the axes, where no curve can run below them.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from steps.reporting.run_record import RunRecord

INK, FAINT = "#52606d", "#9aa5b1"
BLUE, ORANGE, GREEN = "#2b6cb0", "#dd6b20", "#2f855a"
COLOURS = (BLUE, ORANGE, GREEN, "#b83280", "#b7791f", "#319795", "#805ad5", "#c53030")
"""Told apart on white and on black, and mostly by people who see few colours."""
SMOOTHED_ABOVE = 300
"""With more points than this a curve is drawn faintly, and its running mean over it."""
MOST_POINTS = 2000
Rows = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Curve:
    """Points of one label.

    Attributes:
        marked: few points that matter each, such as evaluations: drawn with dots, not smoothed.
        faint: drawn behind the others and without a label of its own.
        exact: never smoothed: it has no noise.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    colour: str
    marked: bool = False
    faint: bool = False
    exact: bool = False
    dashed: bool = False


def figure(
    draw: Callable[[Any], None],
    y_label: str,
    x_label: str = "step",
    size: tuple[float, float] = (6.4, 3.3),
) -> str:
    """An SVG of one pair of axes that `draw` fills."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    # Ids in the file follow the salt, so equal data gives equal bytes.
    with matplotlib.rc_context({"svg.hashsalt": "ponente", "font.size": 9, "svg.fonttype": "none"}):
        drawing = Figure(figsize=size, layout="constrained")
        drawing.patch.set_alpha(0)
        axes = drawing.subplots()
        axes.patch.set_alpha(0)
        axes.grid(color=FAINT, alpha=0.25, linewidth=0.6)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        for side in ("left", "bottom"):
            axes.spines[side].set_color(FAINT)
        axes.tick_params(colors=INK, which="both")
        axes.margins(x=0.02)
        axes.set_xlabel(x_label, color=INK)
        axes.set_ylabel(y_label, color=INK)
        draw(axes)
        buffer = io.StringIO()
        drawing.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def legend_above(axes: Any, columns: int = 4) -> None:
    """Outside the axes, over their upper edge."""
    axes.legend(
        frameon=False,
        labelcolor=INK,
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=columns,
        borderaxespad=0.2,
        handlelength=1.4,
        columnspacing=1.2,
    )


def chart(
    curves: Sequence[Curve],
    y_label: str,
    *,
    x_label: str = "step",
    logarithmic: bool = False,
    from_zero: bool = False,
    restarts: Sequence[float] = (),
) -> str:
    """Curves over a common axis; empty when there is nothing finite to draw.

    Args:
        curves: drawn in order; those with one label for all need no legend.
        y_label: with the unit.
        x_label: with the unit.
        logarithmic: the vertical axis, where values differ by a factor of ten or more.
        from_zero: whether the vertical axis begins there.
        restarts: where the run went on from a checkpoint: faint vertical lines.
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
            axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(_whole_numbers())
        axes.yaxis.set_major_formatter(lambda value, _: readable(value))
        axes.xaxis.set_major_formatter(lambda value, _: readable(value))
        if len({curve.label for curve in curves}) > 1 or restarts:
            legend_above(axes)

    return figure(draw, y_label, x_label)


def _decades(curves: Sequence[Curve]) -> float:
    values = [value for curve in curves for value in curve.y if 0 < value < math.inf]
    return math.log10(max(values) / min(values)) if values else 0.0


def _whole_numbers() -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(nbins=8, integer=True)


def _draw(axes: Any, curve: Curve) -> None:
    style: dict[str, Any] = {"color": curve.colour, "label": curve.label}
    style["linestyle"] = "--" if curve.dashed else "-"
    if curve.marked:
        axes.plot(curve.x, curve.y, marker="o", markersize=3.5, linewidth=1.4, **style)
        return
    raw = thinned(curve.x, curve.y)
    if curve.faint:
        axes.plot(*raw, linewidth=0.8, **{**style, "label": None}, alpha=0.35)
    elif len(curve.y) > SMOOTHED_ABOVE and not curve.exact:
        axes.plot(*raw, linewidth=0.6, **{**style, "label": None}, alpha=0.3)
        axes.plot(*thinned(curve.x, smoothed(curve.y)), linewidth=1.3, **style)
    else:
        axes.plot(*raw, linewidth=1.1, **style)


def thinned(
    x: Sequence[float], y: Sequence[float], most: int = MOST_POINTS
) -> tuple[list[float], list[float]]:
    """At most so many points that look the same: the lowest and the highest of every stretch."""
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
    """Mean over the points around each one, `share` of all, without those that are not finite."""
    half = max(1, round(share * len(values) / 2))
    sums, counts = [0.0], [0]
    for value in values:
        finite = math.isfinite(value)
        sums.append(sums[-1] + (value if finite else 0.0))
        counts.append(counts[-1] + finite)
    found = []
    for index in range(len(values)):
        begin, end = max(0, index - half), min(len(values), index + half + 1)
        count = counts[end] - counts[begin]
        found.append((sums[end] - sums[begin]) / count if count else math.nan)
    return found


def readable(value: float) -> str:
    """A number for an axis: 12k, 3.5M, 0.02."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.6g}{letter}"
    return f"{value:.6g}"


def column(rows: Rows, name: str, scale: float = 1.0) -> list[float]:
    """One number of every row, NaN where a row has none."""
    found = (row.get(name) for row in rows)
    return [math.nan if value is None else scale * float(value) for value in found]


def of_column(
    runs: Sequence[RunRecord], name: str, label: str = "", scale: float = 1.0, **style: Any
) -> list[Curve]:
    """A curve a run of one column of the history; runs without it have none."""
    curves = []
    for run, colour in zip(runs, _cycle(len(runs)), strict=True):
        values = column(run.history, name, scale)
        if any(math.isfinite(value) for value in values):
            said: dict[str, Any] = {"label": label or run.name, "colour": colour, **style}
            curves.append(Curve(x=column(run.history, "step"), y=values, **said))
    return curves


def _cycle(count: int) -> list[str]:
    return [COLOURS[index % len(COLOURS)] for index in range(count)]


def loss_chart(run: RunRecord, restarts: Sequence[float] = ()) -> str:
    """Training loss and that of every held-out set by step, over the corpus's unigram entropy."""
    curves = of_column([run], "loss", "training")
    for name, colour in zip(run.sets, _cycle(len(run.sets) + 1)[1:], strict=True):
        rows = run.scores(name)
        x, y = column(rows, "step"), column(rows, "loss")
        curves.append(Curve(name, x, y, colour, marked=True))
    ends = [value for curve in curves for value in (curve.x[0], curve.x[-1]) if curve.x]
    if run.entropy is not None and ends:
        level = f"unigram entropy {run.entropy:.2f}"
        x, y = [min(ends), max(ends)], [run.entropy] * 2
        curves.append(Curve(level, x, y, FAINT, dashed=True))
    return chart(curves, "loss, nats per token", restarts=restarts)


def norm_charts(run: RunRecord) -> list[tuple[str, str]]:
    """The gradient's and the parameters' norm, on logarithmic axes."""
    gradient = of_column([run], "grad_norm", "gradient norm")
    parameters = of_column([run], "parameter_norm", "parameter norm", exact=True)
    return [
        ("Gradient norm, before clipping", chart(gradient, "2-norm", logarithmic=True)),
        ("Parameter norm", chart(parameters, "2-norm")),
    ]


def rate_chart(run: RunRecord) -> str:
    """Learning rate by step."""
    curves = of_column([run], "learning_rate", "learning rate", colour=ORANGE, exact=True)
    return chart(curves, "learning rate", from_zero=True)


def throughput_chart(run: RunRecord) -> str:
    """Tokens a second: of each step faintly, averaged, and of useful tokens where some are not."""
    curves = of_column([run], "tokens_per_second", "each step", faint=True)
    curves += of_column([run], "tokens_per_second_average", "average of 50 steps", exact=True)
    if any(row.get("padded") for row in run.history):
        curves += of_column([run], "useful_tokens_per_second", "useful, each step", colour=GREEN)
    return chart(curves, "tokens per second", from_zero=True)


def utilisation_chart(run: RunRecord) -> str:
    """MFU in both conventions and HFU, per cent; empty where the devices' peak is not known."""
    names = {"mfu": "MFU, causal", "mfu_full": "MFU, full attention", "hfu": "HFU"}
    curves = [
        curve
        for (name, label), colour in zip(names.items(), COLOURS, strict=False)
        for curve in of_column([run], name, label, 100.0, colour=colour)
    ]
    return chart(curves, "% of the devices' peak", from_zero=True)


def wait_chart(run: RunRecord) -> str:
    """Share of every step in which the devices waited for data, per cent."""
    shares = [
        100.0 * row["data_wait"] / max(row["seconds"], 1e-9)
        for row in run.history
        if "data_wait" in row and "seconds" in row
    ]
    x = [row["step"] for row in run.history if "data_wait" in row and "seconds" in row]
    if not shares:
        return ""
    curves = [Curve("data wait", x, shares, BLUE)]
    return chart(curves, "% of the step's time", from_zero=True)


def memory_chart(run: RunRecord) -> str:
    """Peak memory by step, GiB."""
    return chart(
        of_column([run], "memory_bytes", "memory", 2.0**-30, exact=True), "GiB", from_zero=True
    )
