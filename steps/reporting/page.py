"""The HTML of reports: self-contained files, from manifests and training records."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.identity.fingerprint import plain
from pipeline.plan.lineage import Ancestor, draw

_STYLE = Path(__file__).with_name("page.css")


def render(title: str, subtitle: str, sections: Iterable[tuple[str, str]]) -> str:
    """One page of (heading, HTML); a section without HTML is left out with its heading."""
    body = [f"<h1>{html.escape(title)}</h1><div class='soft'>{html.escape(subtitle)}</div>"]
    body += [
        f"<h2>{html.escape(heading)}</h2>{content}" for heading, content in sections if content
    ]
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width'>"
        f"<title>{html.escape(title)}</title><style>{_STYLE.read_text()}</style></head>"
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )


def cards(figures: Iterable[tuple[str, str]]) -> str:
    """(figure, what it is), shown large."""
    items = (
        f"<div class='card'><b>{html.escape(figure)}</b><span>{html.escape(what)}</span></div>"
        for figure, what in figures
    )
    return f"<div class='cards'>{''.join(items)}</div>"


def charts(captioned: Iterable[tuple[str, str]]) -> str:
    """(caption, SVG) side by side; a chart without SVG is left out."""
    items = [
        f"<figure class='card'><figcaption>{html.escape(caption)}</figcaption>{svg}</figure>"
        for caption, svg in captioned
        if svg
    ]
    return f"<div class='charts'>{''.join(items)}</div>" if items else ""


def samples(written: Iterable[tuple[str, str]]) -> str:
    """(prompt, completion) written by the model."""
    items = [
        f"<blockquote><b>{html.escape(prompt)}</b>{html.escape(text)}</blockquote>"
        for prompt, text in written
    ]
    return f"<div class='card'>{''.join(items)}</div>" if items else ""


def samples_over_time(rows: Sequence[Mapping[str, Any]]) -> str:
    """What was written from each prompt, newest first; the newest is open."""
    prompts: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        prompts.setdefault(str(row["prompt"]), []).append(row)
    items = []
    for prompt, written in prompts.items():
        lines = (_sample(row["step"], row["completion"]) for row in reversed(written))
        head = "<tr><th>step</th><th class='text'>completion</th></tr>"
        items.append(
            f"<details open><summary><b>{html.escape(prompt)}</b></summary>"
            f"<div class='scroll tall'><table>{head}{''.join(lines)}</table></div></details>"
        )
    return f"<div class='card'>{''.join(items)}</div>" if items else ""


def _sample(step: int, completion: str) -> str:
    return f"<tr><td>{step:,}</td><td class='text'>{html.escape(completion)}</td></tr>"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells, the first row being the header; empty without more than that."""

    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    head, *body = rows
    if not body:
        return ""
    lines = "".join(line(row, "td") for row in body)
    return f"<div class='card scroll'><table>{line(head, 'th')}{lines}</table></div>"


def graph(ancestors: list[Ancestor]) -> str:
    """The lineage, inputs first."""
    return f"<div class='card scroll'>{draw(ancestors)}</div>"


def configuration(ancestors: list[Ancestor]) -> str:
    """What every step was asked to do, and where the last one ran."""
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
