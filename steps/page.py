"""The HTML of a run's report: one self-contained file, from manifests and training records."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

from pipeline.lineage import Ancestor, draw

_STYLE = Path(__file__).with_name("page.css")


def render(
    *,
    title: str,
    subtitle: str,
    cards: list[tuple[str, str]],
    charts: list[tuple[str, str]],
    samples: list[tuple[str, str]],
    data_table: list[list[str]],
    ancestors: list[Ancestor],
) -> str:
    """One page.

    Args:
        title, subtitle: of the page.
        cards: (figure, what it is) shown large at the top.
        charts: (caption, SVG).
        samples: (prompt, completion) written by the model.
        data_table: rows of cells, the first row being the header.
        ancestors: the lineage, inputs first.
    """
    sections = [
        f"<h1>{html.escape(title)}</h1><div class='soft'>{html.escape(subtitle)}</div>",
        _cards(cards),
        "<h2>Training</h2>" + _charts(charts),
        "<h2>What the model writes</h2>" + _samples(samples),
        "<h2>Steps</h2><div class='card scroll'>" + draw(ancestors) + "</div>",
        "<h2>Data</h2><div class='card scroll'>" + _table(data_table) + "</div>",
        "<h2>Configuration</h2>" + _configuration(ancestors),
    ]
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width'>"
        f"<title>{html.escape(title)}</title><style>{_STYLE.read_text()}</style></head>"
        f"<body><main>{''.join(sections)}</main></body></html>\n"
    )


def _cards(cards: list[tuple[str, str]]) -> str:
    items = (
        f"<div class='card'><b>{html.escape(figure)}</b><span>{html.escape(what)}</span></div>"
        for figure, what in cards
    )
    return f"<h2></h2><div class='cards'>{''.join(items)}</div>"


def _charts(charts: list[tuple[str, str]]) -> str:
    items = (
        f"<figure class='card'><figcaption>{html.escape(caption)}</figcaption>{svg}</figure>"
        for caption, svg in charts
    )
    return f"<div class='charts'>{''.join(items)}</div>"


def _samples(samples: list[tuple[str, str]]) -> str:
    items = (
        f"<blockquote><b>{html.escape(prompt)}</b>{html.escape(text)}</blockquote>"
        for prompt, text in samples
    )
    return f"<div class='card'>{''.join(items)}</div>"


def _table(rows: list[list[str]]) -> str:
    def line(cells: list[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    head, *body = rows
    return f"<table>{line(head, 'th')}{''.join(line(row, 'td') for row in body)}</table>"


def plain(tree: Any) -> Any:
    """A canonical configuration as people would write it: no type tags around values."""
    if not isinstance(tree, dict):
        return tree
    if "fields" in tree:
        return {name: plain(value) for name, value in tree["fields"].items()}
    if set(tree) == {"float"}:
        return float.fromhex(tree["float"])
    for tag in ("list", "tuple", "set"):
        if set(tree) == {tag}:
            return [plain(item) for item in tree[tag]]
    return {name: plain(value) for name, value in tree.items()}


def _configuration(ancestors: list[Ancestor]) -> str:
    parts = []
    for ancestor in ancestors:
        manifest = ancestor.manifest
        tree = {"config": plain(manifest.config), "key": manifest.key, "version": manifest.version}
        text = html.escape(json.dumps(tree, indent=1))
        parts.append(
            f"<details><summary>{html.escape(manifest.label)}</summary><pre>{text}</pre></details>"
        )
    environment = ancestors[-1].manifest.provenance if ancestors else {}
    parts.append(
        "<details><summary>environment of the last step</summary>"
        f"<pre>{html.escape(json.dumps(environment, indent=1))}</pre></details>"
    )
    return f"<div class='card'>{''.join(parts)}</div>"
