"""The pictures of a run: its graph as SVG, its hours as a timeline, neither needing a script.

A graph of up to a hundred steps is drawn with a box and an arrow each. A larger one would be a
hairball: there every step is a small tile, tiles of one step function stand together, and only the
edges of the selected step's lineage are shown.
"""

from __future__ import annotations

import heapq
import html
from collections.abc import Iterator, Mapping, Sequence
from urllib.parse import quote

from pipeline.pages import readable
from pipeline.pages.layout import ARROW_TIP, Box, Layout, columns_of, curve, layered
from pipeline.pages.record import STATES, Attempt, RunRecord, StepRecord

_MOST_BOXES, _MOST_IN_COLUMN, _MOST_ROWS = 100, 24, 60
_TILE = Box(width=104, height=20, gap_x=4, gap_y=4)
_HEADING, _BLOCK_GAP = 20, 22
_ROOM = 4.0  # percent of the track below which a bar has no room for words
_TICKS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400)


def anchor(key: str) -> str:
    """Link to the panel of a step, escaped for an attribute."""
    return html.escape("#step=" + quote(key))


def graph(record: RunRecord, sizes: Mapping[str, int]) -> str:
    """The graph as SVG.

    Args:
        record: the run.
        sizes: key -> bytes of the output, where known.
    """
    steps = record.steps
    parents = {key: [p for p in step.inputs.values() if p in steps] for key, step in steps.items()}
    if not parents:
        return "<p class='soft'>No step was seen in this run.</p>"
    heads = ""
    tallest = _tallest(parents)
    many = len(parents) > _MOST_BOXES or tallest > _MOST_IN_COLUMN
    if many:
        box = _TILE
        layout, heads = _blocks(parents, steps)
        shapes = [_tile(i, step, layout) for i, step in enumerate(steps.values())]
    else:
        longest = max(len(step.label) for step in steps.values())
        box = Box(width=min(max(7.6 * longest + 34, 148), 220), height=56, gap_x=52, gap_y=20)
        layout = layered(parents, box)
        shapes = [_box(i, s, layout, box, sizes.get(s.key)) for i, s in enumerate(steps.values())]
    index = {key: i for i, key in enumerate(steps)}
    edges = [
        f'<path class="edge" data-from="{index[a]}" data-to="{index[b]}" d="{path}"/>'
        for (a, b), path in layout.edges.items()
    ]
    return (
        f'<svg class="dag{" many" if many else ""}" width="{layout.width:.0f}" '
        f'height="{layout.height:.0f}" viewBox="0 0 {layout.width:.0f} {layout.height:.0f}" '
        f'role="group" aria-label="graph of {len(steps)} steps">'
        + ARROW_TIP
        + f'<clipPath id="inside"><rect width="{box.width - 6:.0f}" height="{box.height:.0f}"/>'
        "</clipPath>" + "".join([*edges, heads, *shapes]) + "</svg>"
    )


def _tallest(parents: Mapping[str, Sequence[str]]) -> int:
    columns = list(columns_of(parents).values())
    counts = dict.fromkeys(columns, 0)
    for column in columns:
        counts[column] += 1
    return max(counts.values())


def summary_line(step: StepRecord, size: int | None) -> str:
    """`executed, 12.3 s, 3.4 MB`: what a box says about its step."""
    parts = [STATES[step.state]]
    if step.seconds is not None:
        parts.append(readable.duration(step.seconds))
    elif step.state == "running" and step.progress:
        parts.append(step.progress)
    if size:
        parts.append(readable.size(size))
    return ", ".join(parts)


def _box(i: int, step: StepRecord, layout: Layout, box: Box, size: int | None) -> str:
    x, y = layout.places[step.key]
    line = summary_line(step, size)
    numbers = line.removeprefix(STATES[step.state]).removeprefix(", ")
    first = html.escape(readable.shortened(step.label, int((box.width - 28) / 7.4)))
    second = html.escape(
        readable.shortened(numbers or STATES[step.state], int((box.width - 26) / 6.8))
    )
    tries = (
        f'<tspan class="tries"> &#215;{len(step.attempts)}</tspan>'
        if len(step.attempts) > 1
        else ""
    )
    return (
        f'<a class="box {step.state}" href="{anchor(step.key)}" data-i="{i}" '
        f'aria-label="{html.escape(step.label)}: {html.escape(line)}" '
        f'transform="translate({x:.1f} {y:.1f})">'
        f"<title>{html.escape(step.label)}: {html.escape(line)}</title>"
        f'<rect class="body" width="{box.width:.0f}" height="{box.height:.0f}" rx="8"/>'
        f'<path class="stripe" d="M8 0H5V{box.height:.0f}H8A8 8 0 0 1 0 {box.height - 8:.0f}V8'
        f'A8 8 0 0 1 8 0z"/>'
        f'<text x="17" y="24" class="name" clip-path="url(#inside)">{first}{tries}</text>'
        f'<text x="17" y="43" class="small" clip-path="url(#inside)">{second}</text></a>'
    )


def _tile(i: int, step: StepRecord, layout: Layout) -> str:
    x, y = layout.places[step.key]
    text = step.label if step.label != function_of(step) else step.key[:10]
    words = html.escape(f"{step.label}: {summary_line(step, None)}")
    shown = html.escape(readable.shortened(text, 16))
    return (
        f'<a class="box {step.state}" href="{anchor(step.key)}" data-i="{i}" aria-label="{words}" '
        f'transform="translate({x:.0f} {y:.0f})"><title>{words}</title>'
        f'<rect class="body" width="{_TILE.width:.0f}" height="{_TILE.height:.0f}" rx="4"/>'
        f'<text x="7" y="14" class="small" clip-path="url(#inside)">{shown}</text></a>'
    )


def function_of(step: StepRecord) -> str:
    """Name of the step function, without its module."""
    return step.step.rpartition(".")[2] or step.label.rstrip("0123456789 -_/") or step.label


def _blocks(
    parents: Mapping[str, Sequence[str]], steps: Mapping[str, StepRecord]
) -> tuple[Layout, str]:
    """A large graph: (layout, headings), tiles of one step function together."""
    column = columns_of(parents)
    groups: dict[str, list[str]] = {}
    for key in sorted(column, key=column.__getitem__):
        groups.setdefault(function_of(steps[key]), []).append(key)
    rows = next(r for r in range(8, 10_000, 4) if _fits(groups, r))
    across, down = _TILE.width + _TILE.gap_x, _TILE.height + _TILE.gap_y
    tall = _HEADING + rows * down
    places: dict[str, tuple[float, float]] = {}
    heads = []
    left, top, widest = _TILE.margin, _TILE.margin, 0.0
    for name, keys in groups.items():
        height = _HEADING + min(rows, len(keys)) * down
        if top > _TILE.margin and top + height > _TILE.margin + tall:
            left, top, widest = left + widest + _BLOCK_GAP, _TILE.margin, 0.0
        wide = -(-len(keys) // rows) * across - _TILE.gap_x
        heads.append(_heading(name, len(keys), left, top, wide))
        for i, key in enumerate(keys):
            places[key] = (left + i // rows * across, top + _HEADING + i % rows * down)
        widest = max(widest, wide)
        top += height + _BLOCK_GAP
    layout = Layout(places, {}, left + widest + _TILE.margin, tall + 2 * _TILE.margin)
    return Layout(layout.places, _tile_edges(parents, places), layout.width, layout.height), (
        "".join(heads)
    )


def _fits(groups: Mapping[str, Sequence[str]], rows: int) -> bool:
    """Whether blocks of so many rows give a picture no wider than twice its height."""
    across, down = _TILE.width + _TILE.gap_x, _TILE.height + _TILE.gap_y
    tall, width, filled = _HEADING + rows * down, 0.0, float("inf")
    for keys in groups.values():
        height = _HEADING + min(rows, len(keys)) * down
        if filled + height > tall:
            width, filled = width + -(-len(keys) // rows) * across + _BLOCK_GAP, 0.0
        filled += height + _BLOCK_GAP
    return width <= 2 * tall


def _heading(name: str, count: int, x: float, y: float, wide: float) -> str:
    text = readable.shortened(name, max(int(wide / 7) - 5, 9))
    return (
        f'<text class="heading" x="{x:.0f}" y="{y + 12:.0f}">{html.escape(text)}'
        f'<tspan class="soft"> {count:,}</tspan><title>{html.escape(name)}</title></text>'
    )


def _tile_edges(
    parents: Mapping[str, Sequence[str]], places: Mapping[str, tuple[float, float]]
) -> dict[tuple[str, str], str]:
    edges = {}
    for key, above in parents.items():
        x, y = places[key]
        for parent in above:
            px, py = places[parent]
            start = (px + _TILE.width, py + _TILE.height / 2)
            edges[parent, key] = curve([start, (x, y + _TILE.height / 2)])
    return edges


def timeline(record: RunRecord) -> str:
    """When each step waited and ran, as HTML that scales with the window."""
    seen = [s for s in record.steps.values() if s.attempts or s.queued is not None]
    if not seen:
        return "<p class='soft'>Every output was there already: nothing had to run.</p>"
    ends = [a.ended for s in seen for a in s.attempts if a.ended] + [record.started + record.wall]
    scale = _Scale(record.started, max(max(ends) - record.started, 0.001))
    seen.sort(key=lambda s: s.attempts[0].started if s.attempts else float("inf"))
    rows = _rows(seen, scale) if len(seen) <= _MOST_ROWS else _lanes(seen, scale)
    ticks = "".join(
        f'<span style="left:{100 * t / scale.span:.3f}%">{_tick(t, scale.pace)}</span>'
        for t in scale.ticks()
    )
    lines = "".join(f'<i style="left:{100 * t / scale.span:.3f}%"></i>' for t in scale.ticks())
    return (
        f'<div class="gantt">{_row("axis", ticks)}'
        f'<div class="rows">{_row("grid", lines)}{"".join(rows)}</div></div>'
    )


def _row(kind: str, track: str, name: str = "") -> str:
    return (
        f'<div class="row {kind}"><b>{name}</b><div class="track">{track}</div><span></span></div>'
    )


class _Scale:
    """Turns Unix seconds into percent of the track."""

    def __init__(self, start: float, span: float) -> None:
        self.start, self.span = start, span
        days = 86400.0 * (1 + span // 691200)
        self.pace = span / 4 if span < 2 else next((t for t in _TICKS if span / t <= 8), days)

    def percent(self, when: float) -> float:
        return 100 * min(max((when - self.start) / self.span, 0.0), 1.0)

    def style(self, begin: float, end: float) -> str:
        left = self.percent(begin)
        return f"left:{left:.3f}%;width:{max(self.percent(end) - left, 0.0):.3f}%"

    def ticks(self) -> list[float]:
        return [i * self.pace for i in range(int(self.span * 0.96 / self.pace) + 1)]


def _tick(seconds: float, pace: float) -> str:
    if seconds == 0:
        return "0"
    if pace < 60:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:g} min" if pace < 3600 else f"{seconds / 3600:g} h"


def _rows(steps: Sequence[StepRecord], scale: _Scale) -> Iterator[str]:
    for step in steps:
        name = html.escape(step.label)
        yield (
            f'<div class="row"><a href="{anchor(step.key)}" title="{name}">{name}</a>'
            f'<div class="track">{_queue(step, scale)}'
            + "".join(_bar(step, a, i, scale) for i, a in enumerate(step.attempts))
            + f"</div><span>{_told(step)}</span></div>"
        )


def _queue(step: StepRecord, scale: _Scale) -> str:
    if step.queued is None or step.state == "unreached":
        return ""
    until = step.attempts[0].started if step.attempts else step.ended
    end = scale.start + scale.span if until is None else until
    return (
        f'<i class="queued" style="{scale.style(step.queued, end)}" '
        f'title="waited {readable.duration(end - step.queued)}"></i>'
    )


def _bar(step: StepRecord, attempt: Attempt, i: int, scale: _Scale, text: str = "") -> str:
    end = attempt.ended if attempt.ended is not None else scale.start + scale.span
    took = readable.duration(end - attempt.started)
    words = f"{step.label}, attempt {i + 1}: {attempt.status}, {took}"
    words += f"; {attempt.cause}" if attempt.cause else ""
    shown = text if scale.percent(end) - scale.percent(attempt.started) > _ROOM else ""
    # In rows the step's name is the link already; a second tab stop per row would be a nuisance.
    focus = "" if text else ' tabindex="-1"'
    return (
        f'<a class="bar {html.escape(attempt.status)}" href="{anchor(step.key)}"{focus} '
        f'style="{scale.style(attempt.started, end)}" title="{html.escape(words)}" '
        f'aria-label="{html.escape(words)}">{html.escape(shown)}</a>'
    )


def _told(step: StepRecord) -> str:
    """The words at the end of a row."""
    finished = step.seconds is not None and step.state != "failed"
    text = readable.duration(step.seconds or 0.0) if finished else STATES[step.state]
    return text + (f", {len(step.attempts)} attempts" if len(step.attempts) > 1 else "")


def _lanes(steps: Sequence[StepRecord], scale: _Scale) -> Iterator[str]:
    """Many attempts, packed: each lane holds attempts that do not overlap."""
    bars = [(a.started, i, a, step) for step in steps for i, a in enumerate(step.attempts)]
    bars.sort(key=lambda bar: bar[0])
    lanes: list[list[str]] = []
    free: list[tuple[float, int]] = []
    for started, i, attempt, step in bars:
        end = attempt.ended if attempt.ended is not None else scale.start + scale.span
        if free and free[0][0] <= started:
            lane = heapq.heappop(free)[1]
        else:
            lane = len(lanes)
            lanes.append([])
        heapq.heappush(free, (end, lane))
        lanes[lane].append(_bar(step, attempt, i, scale, step.label))
    for number, lane in enumerate(lanes, 1):
        yield _row("packed", "".join(lane), f"lane {number}")
