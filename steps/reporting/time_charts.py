"""Where a run's wall time went: a waterfall, a time line of its attempts, bars of several runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from steps.reporting.charts import BLUE, FAINT, GREEN, INK, figure, legend_above

if TYPE_CHECKING:
    from training.goodput import Account, Span
    from training.journal import Attempt

RED = "#c53030"
NAMES = {
    "step": "training steps",
    "init": "init",
    "compile": "compile",
    "data_wait": "data wait",
    "evaluation": "evaluation",
    "checkpoint": "checkpoint",
    "samples": "samples",
    "other": "other",
    "redone": "lost: done again",
    "dead": "lost: dead time",
}
PART_COLOURS = {
    "step": GREEN,
    "init": "#805ad5",
    "compile": "#b7791f",
    "data_wait": "#dd6b20",
    "evaluation": BLUE,
    "checkpoint": "#319795",
    "samples": "#63b3ed",
    "other": FAINT,
    "redone": RED,
    "dead": "#742a2a",
}
MOST_LINES = 14
"""Attempts that get a line each; more of them share one."""


def duration(seconds: float) -> str:
    """As people say it: 0.4 s, 12 min, 3.5 h, 2.1 d."""
    for size, unit in ((86_400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"


def unit_of(seconds: float) -> tuple[float, str]:
    """(seconds, name) of the unit for an axis as long as that."""
    units = ((2 * 86_400.0, 86_400.0, "days"), (2 * 3600.0, 3600.0, "hours"))
    for least, size, name in (*units, (120.0, 60.0, "minutes")):
        if seconds >= least:
            return size, name
    return 1.0, "seconds"


def waterfall_chart(account: Account) -> str:
    """From the total down to what was training, a bar for everything that took time."""
    size, unit = unit_of(account.total)
    taken = [
        (name, account.parts[name])
        for name in NAMES
        if name != "step" and account.parts[name] > 0.0005 * account.total
    ]
    bars: list[tuple[str, float, float, str]] = [("total", 0.0, account.total, FAINT)]
    left = account.total
    for name, seconds in taken:
        left -= seconds
        bars.append((NAMES[name], left, seconds, PART_COLOURS[name]))
    bars.append((NAMES["step"], 0.0, account.parts["step"], PART_COLOURS["step"]))

    def draw(axes: Any) -> None:
        for row, (_, start, width, colour) in enumerate(bars):
            axes.barh(row, width / size, left=start / size, color=colour, height=0.68)
            share = f"{duration(width)}, {width / (account.total or 1.0):.1%}"
            _beside(axes, share, start / size, (start + width) / size, account.total / size, row)
        axes.set_yticks(range(len(bars)), [name for name, *_ in bars])
        axes.set_ylim(len(bars) - 0.4, -0.6)
        axes.set_xlim(0, 1.22 * account.total / size)
        axes.grid(visible=False, axis="y")

    return figure(draw, "", f"wall time, {unit}", (6.4, 0.8 + 0.27 * len(bars)))


def _beside(axes: Any, text: str, start: float, end: float, total: float, row: int) -> None:
    """Text right of a bar where there is room, left of it otherwise."""
    right = end + 0.01 * total
    if end <= 0.99 * total or start < 0.3 * total:
        axes.text(right, row, text, va="center", ha="left", color=INK, fontsize=8)
    else:
        axes.text(start - 0.01 * total, row, text, va="center", ha="right", color=INK, fontsize=8)


def timeline_chart(account: Account) -> str:
    """Attempts over the run's wall time: what counts, what was done again, checkpoints as ticks."""
    size, unit = unit_of(account.total)
    spans = account.spans
    shared = len(spans) > MOST_LINES

    def draw(axes: Any) -> None:
        labels = {"counts": GREEN, "done again": RED, "dead time": FAINT}
        for number, span in enumerate(spans):
            row = 0 if shared else number
            _bar(axes, row, span.began, span.useful, size, color=GREEN)
            _bar(axes, row, span.useful, span.ended, size, color=RED, alpha=0.75)
            gap = span.ended + span.dead
            _bar(axes, row, span.ended, gap, size, color="none", edgecolor=FAINT, hatch="////")
            _ticks(axes, row, span, size)
        for label, colour in labels.items():
            hatch = "////" if label == "dead time" else None
            face = "none" if hatch else colour
            axes.barh(0, 0, color=face, edgecolor=colour, hatch=hatch, label=label, linewidth=0)
        axes.plot([], [], color=INK, marker="|", linestyle="none", label="checkpoint")
        names = [f"all {len(spans)}"] if shared else [_name(n, s) for n, s in enumerate(spans)]
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.set_xlim(0, account.total / size or 1.0)
        axes.grid(visible=False, axis="y")
        legend_above(axes)

    lines = 1 if shared else len(spans)
    return figure(draw, "", f"time since the run began, {unit}", (6.4, 1.2 + 0.3 * lines))


def _bar(axes: Any, row: int, start: float, end: float, size: float, **style: Any) -> None:
    if end > start:
        width = (end - start) / size
        axes.barh(row, width, left=start / size, height=0.6, linewidth=0, **style)


def _ticks(axes: Any, row: int, span: Span, size: float) -> None:
    times = [when / size for when, _ in span.checkpoints if when <= span.ended + 1e-6]
    axes.vlines(times, row - 0.3, row + 0.3, color=INK, linewidth=0.8)


def _name(number: int, span: Span) -> str:
    return f"{number + 1}: steps {steps_of(span.attempt)}"


def steps_of(attempt: Attempt) -> str:
    """The steps between which an attempt worked; none before it has its state."""
    if attempt.first_step is None:
        return "none"
    return f"{attempt.first_step:,} to {attempt.last_step:,}"


def bars_chart(runs: Sequence[tuple[str, Account]]) -> str:
    """A stacked bar a run, each as long as 100 per cent of its wall time."""
    shown = [n for n in NAMES if any(a.parts[n] > 0.001 * a.total for _, a in runs)]

    def draw(axes: Any) -> None:
        lefts = [0.0] * len(runs)
        for name in shown:
            widths = [100 * a.parts[name] / (a.total or 1.0) for _, a in runs]
            colour, rows = PART_COLOURS[name], range(len(runs))
            axes.barh(rows, widths, left=lefts, color=colour, height=0.6, label=NAMES[name])
            lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
        axes.set_yticks(range(len(runs)), [name for name, _ in runs])
        axes.set_ylim(len(runs) - 0.4, -0.6)
        axes.set_xlim(0, 100)
        axes.grid(visible=False, axis="y")
        legend_above(axes, columns=4)

    return figure(draw, "", "% of the wall time", (6.4, 1.5 + 0.32 * len(runs)))
