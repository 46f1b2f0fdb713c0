"""Charts of a training run as inline SVG, drawn with matplotlib; viewing fetches nothing."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

_INK, _FAINT = "#52606d", "#9aa5b1"
_BLUE, _ORANGE, _GREEN = "#2b6cb0", "#dd6b20", "#2f855a"
Rows = Sequence[dict[str, Any]]


def _figure(draw: Callable[[Any], None], y_label: str, x_label: str = "step") -> str:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    # Ids in the file follow the salt, so equal data gives equal bytes.
    with matplotlib.rc_context({"svg.hashsalt": "ponente", "font.size": 9, "svg.fonttype": "none"}):
        figure = Figure(figsize=(6.4, 3.3), layout="constrained")
        figure.patch.set_alpha(0)
        axes = figure.subplots()
        axes.patch.set_alpha(0)
        axes.grid(color=_FAINT, alpha=0.25, linewidth=0.6)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        for side in ("left", "bottom"):
            axes.spines[side].set_color(_FAINT)
        axes.tick_params(colors=_INK)
        axes.set_xlabel(x_label, color=_INK)
        axes.set_ylabel(y_label, color=_INK)
        draw(axes)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _column(rows: Rows, name: str) -> list[float]:
    return [row[name] for row in rows]


def _legend(axes: Any) -> None:
    axes.legend(frameon=False, labelcolor=_INK)


def loss_chart(history: Rows, evaluations: Rows, unigram_entropy: float) -> str:
    """Training and validation loss by step, over the corpus's unigram entropy (nats per token)."""

    def draw(axes: Any) -> None:
        axes.plot(
            _column(history, "step"),
            _column(history, "loss"),
            color=_BLUE,
            alpha=0.55,
            linewidth=0.9,
            label="training",
        )
        axes.plot(
            _column(evaluations, "step"),
            _column(evaluations, "loss"),
            color=_ORANGE,
            marker="o",
            markersize=4,
            linewidth=1.4,
            label="validation",
        )
        axes.axhline(unigram_entropy, color=_GREEN, linestyle="--", linewidth=1.2)
        axes.annotate(
            f"unigram entropy {unigram_entropy:.2f}",
            (1, unigram_entropy),
            xycoords=("axes fraction", "data"),
            xytext=(-4, 4),
            textcoords="offset points",
            ha="right",
            color=_GREEN,
        )
        _legend(axes)

    return _figure(draw, "loss, nats per token")


def throughput_chart(history: Rows) -> str:
    """Tokens per second by step."""

    def draw(axes: Any) -> None:
        axes.plot(
            _column(history, "step"),
            _column(history, "tokens_per_second"),
            color=_BLUE,
            linewidth=0.9,
        )
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")

    return _figure(draw, "tokens per second")


def gradient_chart(history: Rows) -> str:
    """Gradient norm before clipping, by step, on a logarithmic axis."""

    def draw(axes: Any) -> None:
        axes.plot(
            _column(history, "step"), _column(history, "grad_norm"), color=_BLUE, linewidth=0.9
        )
        axes.set_yscale("log")

    return _figure(draw, "gradient norm")


def rate_chart(history: Rows) -> str:
    """Learning rate by step."""

    def draw(axes: Any) -> None:
        axes.plot(_column(history, "step"), _column(history, "learning_rate"), color=_ORANGE)
        axes.set_ylim(bottom=0)
        axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))

    return _figure(draw, "learning rate")
