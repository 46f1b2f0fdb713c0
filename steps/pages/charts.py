"""Charts of training runs: of one run with a colour per curve, of several with a colour per run."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from pipeline.pages.readable import duration
from steps.pages.curves import BLUE, COLOURS, GREY, Curve, chart, legend
from steps.pages.run_record import TrainingRun

if TYPE_CHECKING:
    from training.metrics.goodput import Account


@dataclass(frozen=True)
class Panel:
    """One chart of the history."""

    caption: str
    y_label: str
    columns: Mapping[str, str]  # and their labels; comparisons of runs draw the first one only
    scale: float = 1.0
    exact: bool = True
    faint: tuple[str, ...] = ()  # columns drawn behind the others
    logarithmic: bool = False
    from_zero: bool = True
    reach: float = 0.0  # see `chart`

    def of_run(self, run: TrainingRun) -> Markup:
        """The chart of one run's columns; empty if it has none of them."""
        named = zip(self.columns.items(), COLOURS, strict=False)
        return self._chart(
            self._curve(run, name, label or self.caption, colour)
            for (name, label), colour in named
            if self._known(run, name)
        )

    def of_runs(self, runs: Sequence[TrainingRun]) -> Markup:
        """The chart of the first column of several runs."""
        name = next(iter(self.columns))
        pairs = zip(runs, itertools.cycle(COLOURS))
        return self._chart(
            self._curve(r, name, r.name, c) for r, c in pairs if self._known(r, name)
        )

    def _known(self, run: TrainingRun, name: str) -> bool:
        padded = not name.startswith("useful_") or any(row.get("padded") for row in run.history)
        return padded and any(map(math.isfinite, column(run.history, name)))

    def _curve(self, run: TrainingRun, name: str, label: str, colour: str) -> Curve:
        x, y = column(run.history, "step"), column(run.history, name, self.scale)
        return Curve(label, x, y, colour, faint=name in self.faint, exact=self.exact)

    def _chart(self, curves: Iterable[Curve]) -> Markup:
        return chart(
            curves,
            self.y_label,
            logarithmic="y" * self.logarithmic,
            from_zero="y" * self.from_zero,
            reach=self.reach,
        )


_LOSS = Panel("Training loss", "nats per token", {"loss": ""}, exact=False, from_zero=False)
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


def column(rows: Sequence[Mapping[str, Any]], name: str, scale: float = 1.0) -> list[float]:
    """One number per row, NaN if the row has none; `data_wait` as a share of the step's time."""

    def number(row: Mapping[str, Any]) -> float:
        value = row.get(name)
        if name == "data_wait" and value is not None:
            value = value / row["seconds"] if row.get("seconds") else None
        return math.nan if value is None else scale * float(value)

    return [number(row) for row in rows]


def loss_chart(
    run: TrainingRun, restarts: Sequence[float] = (), clicked: tuple[str, str] = ("", "")
) -> Markup:
    """Loss in training and on held-out splits, the unigram entropy; `clicked` as in `chart`."""
    steps = column(run.history, "step")
    curves = [Curve("training", steps, column(run.history, "loss"), BLUE)] if steps else []
    for name, colour in zip(run.splits, itertools.cycle(COLOURS[1:])):
        curves.append(_scores(run, name, name, colour))
    ends = [value for curve in curves for value in (curve.x[0], curve.x[-1]) if curve.x]
    if run.entropy is not None and ends:
        level = f"unigram entropy {run.entropy:.2f}"
        x, y = [min(ends), max(ends)], [run.entropy] * 2
        curves.append(Curve(level, x, y, GREY, "dashed"))
    for row in run.forecasts[-1:]:
        last, low, high = (row[name] for name in ("steps", "low", "high"))
        x = [last - 0.02 * last, last]
        label = "forecast, 80 %"
        curves.append(Curve(label, x, [low] * 2, COLOURS[3], "band", high=[high] * 2))
        for step, low, high in row.get("early", ()):
            x, label = [step - step // 5, step], "training loss expected early, 80 %"
            curves.append(Curve(label, x, [low] * 2, BLUE, "band", high=[high] * 2))
    if restarts:
        curves.append(Curve("restart", restarts, (), GREY, "rule"))
    return chart(curves, "nats per token", clicked=clicked)


def _scores(run: TrainingRun, split: str, label: str, colour: str) -> Curve:
    rows = run.scores(split)
    return Curve(label, column(rows, "step"), column(rows, "loss"), colour, "dots")


def overlaid(runs: Sequence[TrainingRun]) -> list[tuple[str, Markup]]:
    """(caption, chart) of every metric of several runs, with a colour per run."""
    captioned = []
    for split in dict.fromkeys(name for run in runs for name in run.splits):
        pairs = zip(runs, itertools.cycle(COLOURS))
        curves = [_scores(run, split, run.name, colour) for run, colour in pairs]
        captioned.append((f"Loss on {split}", chart(curves, "nats per token")))
    return captioned + [(panel.caption, panel.of_runs(runs)) for panel in (_LOSS, *PANELS)]


def training_charts(
    run: TrainingRun, account: Account | None, clicked: tuple[str, str] = ("", "")
) -> list[tuple[str, Markup]]:
    """(caption, chart) of every metric that has a value per step."""
    began = [span.attempt.first_step for span in account.spans[1:]] if account else []
    restarts = [step for step in began if step is not None]
    panels = [(panel.caption, panel.of_run(run)) for panel in PANELS]
    return [("Loss", loss_chart(run, restarts, clicked)), *panels]


PARTS = {
    "init": ("init", "var(--violet)"),
    "compile": ("compile", "var(--olive)"),
    "data_wait": ("data wait", "var(--amber)"),
    "evaluation": ("evaluation", "var(--blue)"),
    "checkpoint": ("checkpoint", "var(--teal)"),
    "samples": ("samples", "var(--pink)"),
    "other": ("other", GREY),
    "skipped": ("steps not applied", "color-mix(in srgb,var(--olive),var(--grey))"),
    "redone": ("lost: done again", "var(--red)"),
    "dead": ("lost: dead time", "color-mix(in srgb,var(--red),var(--grey))"),
    "step": ("training steps", "var(--green)"),
}
"""Name and colour of every part of an account of the wall time."""


def time_charts(account: Account | None) -> list[tuple[str, Markup]]:
    """(caption, chart) of the parts of a run's wall time, below each other; none without times."""
    if account is None or not account.total:
        return []
    left, rows = 0.0, [("total", [(GREY, 0.0, 100.0, "")], duration(account.total))]
    for part, (name, colour) in PARTS.items():
        width = 100 * account.parts[part] / account.total
        if width > 0.05 or part == "step":
            rows.append((name, [(colour, left, width, "")], _share(account, part)))
        left += width
    caption = f"Goodput {account.goodput:.1%}: the share of the wall time that went to steps"
    return [(caption, bar_rows(rows))]


def bars_chart(runs: Sequence[tuple[str, Account]]) -> Markup:
    """A stacked bar per run, with the parts of its wall time in per cent."""
    shown = [n for n in PARTS if any(a.parts[n] > 0.001 * a.total for _, a in runs)][::-1]
    rows = []
    for name, account in runs:
        left, bars = 0.0, []
        for part in shown:
            width = 100 * account.parts[part] / (account.total or 1.0)
            title = f"{PARTS[part][0]}: {_share(account, part)}"
            bars.append((PARTS[part][1], left, width, title))
            left += width
        rows.append((name, bars, duration(account.total)))
    listed = legend(PARTS[part] for part in shown)
    return Markup('<p class="legend"><span class="soft">% of the wall time</span>{}</p>{}').format(
        listed, bar_rows(rows)
    )


def _share(account: Account, part: str) -> str:
    seconds = account.parts[part]
    return f"{duration(seconds)}, {seconds / (account.total or 1.0):.1%}"


def bar_rows(rows: Iterable[tuple[str, Iterable[tuple[str, float, float, str]], str]]) -> Markup:
    """A row each of a name, bars of (colour, left and width in per cent, title), and a text."""
    bar = Markup('<i class="bar" style="--c:{};left:{:.3f}%;width:{:.3f}%" title="{}"></i>')
    row = Markup('<div class="row"><span>{}</span><div class="track">{}</div><span>{}</span></div>')
    return Markup("").join(
        row.format(name, Markup("").join(bar.format(*each) for each in bars), text)
        for name, bars, text in rows
    )
