"""Pages of runs as tests want them: parsed, with the places of their boxes."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath

from pipeline.pages import page as run_page
from tests.pipeline.execute import run_logs
from tests.pipeline.execute.run_logs import START, key

RUN = "20260921-120000-aaaaaa"
VOID = {"base", "meta", "link"}


class Page(HTMLParser):
    """A page as a test wants it: elements with attributes and text, and whether tags balance."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.stack, self.wrong = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        element = {"tag": tag, "text": "", **dict(attrs)}
        self.elements.append(element)
        if tag not in VOID:
            self.stack.append(element)

    def handle_startendtag(self, tag, attrs):
        self.elements.append({"tag": tag, "text": "", **dict(attrs)})

    def handle_endtag(self, tag):
        if not self.stack or self.stack.pop()["tag"] != tag:
            self.wrong.append((tag, self.getpos()))

    def handle_data(self, data):
        for element in self.stack:
            element["text"] += data

    def all(self, tag, **having):
        return [e for e in self.elements if e["tag"] == tag and having.items() <= e.items()]

    def of_class(self, name):
        return [e for e in self.elements if name in (e.get("class") or "").split()]

    def panel(self, label):
        """The text of a step's details, with single spaces."""
        (found,) = self.all("div", id=key(label))
        return " ".join(found["text"].split())


def written(prefix, run=RUN):
    """Write a run's page; returns (its path, parsed)."""
    path = Path(run_page.write(str(prefix), run))
    return path, Page(path.read_text())


def troubled(prefix: str) -> tuple[Path, Page]:
    """The page of a run with every kind of step, between an earlier and a later run."""
    run_logs.clean_run(prefix, "20260920-000000-before", START - 9000, reused=0)
    run_page.write(prefix, "20260920-000000-before")
    run_logs.troubled_run(prefix, RUN)
    path = Path(run_page.write(prefix, RUN))
    run_logs.clean_run(prefix, "20260922-000000-after", START + 9000, reused=6)
    run_page.write(prefix, "20260922-000000-after")
    return path, Page(path.read_text())


def boxes_of(page):
    """(x, y, width, height) of every box, from the SVG's attributes."""
    found = []
    for i, element in enumerate(page.elements):
        if element["tag"] == "a" and "box" in (element.get("class") or "").split():
            x, y = map(float, re.findall(r"[\d.]+", element["transform"]))
            rect = next(e for e in page.elements[i:] if e["tag"] == "rect")
            found.append((x, y, float(rect["width"]), float(rect["height"])))
    return found


def right_end(text, size, weight):
    """Where a text element of an SVG ends, by the font's own widths, in the units of its x."""
    font = FontProperties(family="DejaVu Sans", weight=weight, size=size)
    outline = TextPath((float(text["x"]), 0), text["text"], prop=font)
    return outline.get_extents().x1


def overlaps(boxes):
    return [
        (a, b)
        for i, a in enumerate(boxes)
        for b in boxes[i + 1 :]
        if a[0] < b[0] + b[2] and b[0] < a[0] + a[2] and a[1] < b[1] + b[3] and b[1] < a[1] + a[3]
    ]
