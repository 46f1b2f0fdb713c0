"""The page of a preparation: what each stage received, dropped by reason, and passed on."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from markupsafe import Markup

from pipeline import Result, StepContext, step
from pipeline.plan.lineage import Ancestor, lineage
from pipeline.store import storage
from pipeline.store.manifest import resolve_ref
from steps.artifacts import Documents, Report
from steps.pages.charts import bar_rows
from steps.pages.curves import COLOURS, GREY, Curve, chart

_KEPT = "var(--green)"
_COLOURS = [colour for colour in COLOURS if colour != _KEPT]  # of the first reasons; then grey


class Stage(NamedTuple):
    """One step of a preparation, as its result says."""

    name: str
    result: dict[str, Any]

    @property
    def tokens(self) -> int:
        """Tokens of what it passed on, by the documents' `token_count`."""
        return sum(split["tokens_counted"] for split in self.result["splits"].values())


@step(output=Report, version=1, reads_lineage=True)
def preparation_report(run: StepContext, documents: Documents) -> Result:
    """The HTML page of all steps that made the documents: a funnel, reasons, examples, scores."""
    stages = stages_of(lineage([documents.path]))
    with run.shard("page") as directory:
        page = render(stages).encode()
        storage.write_atomic(storage.join(directory, "index.html"), page)
    first, last = stages[0].result, stages[-1]
    return {
        "headline": [
            f"{last.result['documents_kept']:,} of {first['documents_seen']:,} documents, "
            f"{last.tokens:,} tokens, after {len(stages)} steps"
        ]
    }


def stages_of(ancestors: Sequence[Ancestor]) -> list[Stage]:
    """The steps that made the last one's documents, each from those of the one before it."""
    known, found = {each.path: each for each in ancestors}, []
    each: Ancestor | None = ancestors[-1]
    while each is not None:
        if "documents_seen" in each.manifest.result:
            found.append(Stage(each.manifest.label, each.manifest.result))
        inputs = each.manifest.inputs
        read = next((inputs[name] for name in ("documents", "source") if name in inputs), None)
        each = known.get(resolve_ref(each.path, read["directory"])) if read else None
    return found[::-1]


def render(stages: Sequence[Stage]) -> str:
    """The page as HTML."""
    from steps.pages import page

    return page.render(
        "preparation",
        funnel=_funnel(stages),
        stages=_stages(stages),
        reasons=_reasons(stages),
        scores=_scores(stages),
        examples=[
            (stage.name, reason, shown)
            for stage in stages
            for reason, shown in stage.result.get("examples", {}).items()
        ],
    )


def _funnel(stages: Sequence[Stage]) -> Markup:
    """A bar for what each stage received: what it passed on, and what it dropped by reason."""
    widest = max(stage.result["documents_seen"] for stage in stages) or 1
    rows, grey = [], itertools.repeat(GREY)
    for stage in stages:
        parts = [("passed on", stage.result["documents_kept"], _KEPT)]
        dropped = sorted(stage.result["dropped"].items(), key=lambda pair: -pair[1])
        named = [pair for pair in dropped if pair[1]]
        coloured = zip(named, itertools.chain(_COLOURS, grey), strict=False)
        parts += [(*pair, colour) for pair, colour in coloured]
        left, drawn = 0.0, []
        for reason, count, colour in parts:
            width = 100 * count / widest
            drawn.append((colour, left, width, f"{reason}: {count:,}"))
            left += width
        text = f"{stage.result['documents_kept']:,} documents, {stage.tokens:,} tokens"
        rows.append((stage.name, drawn, text))
    return bar_rows(rows)


def _stages(stages: Sequence[Stage]) -> list[list[str]]:
    rows = [["step", "received", "passed on", "share", "tokens received", "tokens passed on"]]
    for stage in stages:
        seen, kept = stage.result["documents_seen"], stage.result["documents_kept"]
        received = stage.result.get("tokens_seen")
        rows.append(
            [
                *(stage.name, f"{seen:,}", f"{kept:,}", f"{kept / max(seen, 1):.1%}"),
                *("-" if received is None else f"{received:,}", f"{stage.tokens:,}"),
            ]
        )
    return rows


def _reasons(stages: Sequence[Stage]) -> list[list[str]]:
    rows = [["step", "reason", "documents", "share of received", "tokens"]]
    for stage in stages:
        tokens = stage.result.get("dropped_tokens", {})
        for reason, count in sorted(stage.result["dropped"].items(), key=lambda pair: -pair[1]):
            if count:
                share = f"{count / stage.result['documents_seen']:.2%}"
                of = f"{tokens[reason]:,}" if reason in tokens else "-"
                rows.append([stage.name, reason, f"{count:,}", share, of])
    return rows


def _scores(stages: Sequence[Stage]) -> list[tuple[str, Markup]]:
    """(caption, histogram) of each stage that scored documents."""
    found = []
    for stage in stages:
        if (scores := stage.result.get("scores")) is not None:
            x, y = _outline(scores["bins"], scores["counts"])
            drawn = chart(
                [Curve("documents", x, y, COLOURS[0])], "documents", "score", from_zero="y"
            )
            found.append((f"Scores of {stage.name}", drawn))
    return found


def _outline(edges: Sequence[float], counts: Sequence[int]) -> tuple[list[float], list[float]]:
    """The outline of a histogram, as points of a line."""
    x = [edge for edge in edges for _ in range(2)][1:-1]
    return x, [float(count) for count in counts for _ in range(2)]
