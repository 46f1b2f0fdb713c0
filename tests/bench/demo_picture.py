"""The graph and the loss curve of a finished `make demo` as one SVG, for the README.

python -m tests.bench.demo_picture runs/ > docs/demo.svg
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

COLUMNS, COLUMN, BOX, HEIGHT = 4, 130, 112, 36  # of a line of the graph; more go back below it
WIDTH, END = COLUMNS * COLUMN, 500
PLOT = (40, 262, 470, 190)  # left, top, width, height
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #24292f } .small { font-size: 12px; fill: #57606a }
rect { fill: #eef4fb; stroke: #2f6fab } path { fill: none; stroke: #57606a }
.loss { stroke: #2f6fab } .grid { stroke: #d0d7de } circle { fill: #bc4c00 }
.entropy { stroke-dasharray: 4 4 }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .small { fill: #9198a1 } rect { fill: #12283f; stroke: #6cb0f2 }
path { stroke: #9198a1 } .loss { stroke: #6cb0f2 } .grid { stroke: #3d444d }
circle { fill: #f0883e } }
"""


def main(store: Path) -> None:
    """Print the picture of the store's one run."""
    manifests = {
        path.parent.name: json.loads(path.read_text()) for path in store.glob("*/manifest.json")
    }
    (metrics,) = store.glob("train-*/attempts/*/shards/record/metrics.jsonl")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    headline = next(m["result"]["headline"] for m in manifests.values() if m["label"] == "report")
    entropy = float(re.search(r"unigram entropy ([\d.]+)", headline[0])[1])
    parts = [*graph(manifests), *curve(rows, entropy)]
    size = f'width="640" viewBox="0 0 {WIDTH} {END}"'
    print(f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>{STYLE}</style>')
    print("\n".join(parts), "\n</svg>", sep="")


def graph(manifests: dict[str, Any]) -> Iterator[str]:
    """A box for each step, in the column after its last input, and a line for each input."""
    inputs = {name: list(directories(m["inputs"])) for name, m in manifests.items()}

    def column(name: str) -> int:
        return max((column(before) + 1 for before in inputs[name]), default=0)

    columns: dict[int, list[str]] = {}
    for name in sorted(manifests):
        columns.setdefault(column(name), []).append(name)
    place = {}
    for number, names in columns.items():
        line, x = divmod(number, COLUMNS)
        x = COLUMNS - 1 - x if line % 2 else x
        for y, name in enumerate(names):
            place[name] = (9 + x * COLUMN, 40 + line * 105 + (y - (len(names) - 1) / 2) * 62)
    for name, (x, y) in place.items():
        for before in inputs[name]:
            x0, y0 = place[before]
            middle, end = y0 + HEIGHT / 2, y + HEIGHT / 2
            if column(before) // COLUMNS != column(name) // COLUMNS:
                yield f'<path d="M{x0 + BOX / 2} {y0 + HEIGHT}L{x + BOX / 2} {y}"/>'
                continue
            side = 1 if x > x0 else -1
            left, right = (x0 + BOX, x) if x > x0 else (x0, x + BOX)
            bend = f"{left + side * 9} {middle} {right - side * 9} {end}"
            if any(y1 == y and min(x0, x) < x1 < max(x0, x) for x1, y1 in place.values()):
                bend = f"{left + side * 10} {middle - 48} {right - side * 10} {end - 48}"
            yield f'<path d="M{left} {middle}C{bend} {right} {end}"/>'
    for name, (x, y) in place.items():
        label, seconds = manifests[name]["label"], manifests[name]["seconds"]
        yield f'<rect x="{x}" y="{y}" width="{BOX}" height="{HEIGHT}" rx="6"/>'
        yield text(x + BOX / 2, y + 16, label, anchor="middle")
        yield text(x + BOX / 2, y + 29, f"{seconds:.1f} s", "small", "middle")


def directories(tree: Any) -> Iterator[str]:
    """The directories of inputs, however they are nested."""
    values = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    for value in values:
        if isinstance(value, dict) and "directory" in value:
            yield value["directory"]
        else:
            yield from directories(value)


def curve(rows: list[dict[str, Any]], entropy: float) -> Iterator[str]:
    """Training loss by step, validation losses as dots, and the entropy of single tokens."""
    left, top, width, height = PLOT
    steps = [(row["step"], row["loss"]) for row in rows if row["kind"] == "step"]
    scores = [(row["step"], row["loss"]) for row in rows if row["kind"] == "evaluation"]
    last, low = steps[-1][0], math.floor(min(loss for _, loss in steps))
    high = math.ceil(max(loss for _, loss in steps))

    def at(step: float, loss: float) -> tuple[float, float]:
        return left + width * step / last, top + height * (high - loss) / (high - low)

    for loss in range(low, high + 1):
        x, y = at(0, loss)
        yield f'<path class="grid" d="M{x} {y:.1f}H{left + width}"/>'
        yield text(x - 8, y + 4, str(loss), "small", "end")
    for step in range(0, last + 1, 100):
        yield text(at(step, low)[0], top + height + 16, str(step), "small", "middle")
    x, y = at(0, entropy)
    yield f'<path class="entropy" d="M{x} {y:.1f}H{left + width}"/>'
    yield text(left + width, y - 5, f"unigram entropy {entropy:.2f}", "small", "end")
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in steps))
    yield f'<path class="loss" d="M{points}"/>'
    for step, loss in scores:
        x, y = at(step, loss)
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>'
    yield text(left + width / 2, top + height + 34, "step", "small", "middle")
    yield text(left, top - 10, "loss, nats per token: training, and validation as dots")


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    """A line of text."""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text class="{kind}" {place}>{escape(words)}</text>'


if __name__ == "__main__":
    main(Path(sys.argv[1]))
