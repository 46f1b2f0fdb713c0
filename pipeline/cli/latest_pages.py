"""Short paths, stable across runs, that redirect to the pages of an experiment's outputs."""

from __future__ import annotations

import html
from collections import Counter

from pipeline.cli.context import Context
from pipeline.errors import PonenteError
from pipeline.execute.executor import Execution
from pipeline.graph.declaration import FULL
from pipeline.store import storage


def point_to_pages(context: Context, execution: Execution) -> list[tuple[str, str]]:
    """(label, URL) of every target that has a page: `reports/EXPERIMENT[-PRESET]/LABEL.html`.

    A second target with the same label gets LABEL-2, in the order of the targets. The file
    redirects a browser, by a relative path if the page is in the same store. A file that cannot be
    written does not fail the run; the URL is then the page's own.
    """
    assert context.experiment is not None
    folder = context.experiment.name + (f"-{context.preset}" if context.preset != FULL else "")
    prefix, pages = context.store.prefix, []
    labels: Counter[str] = Counter()
    for node in execution.targets:
        found = execution.published[node.key]
        page = node.output(found.path, found.manifest).page
        if page:
            labels[node.label] += 1
            suffix = f"-{labels[node.label]}" if labels[node.label] > 1 else ""
            url = storage.join(prefix, "reports", folder, f"{node.label}{suffix}.html")
            inside = page.startswith(f"{prefix}/")
            target = html.escape(f"../../{page.removeprefix(f'{prefix}/')}" if inside else page)
            refresh = f'<meta http-equiv="refresh" content="0; url={target}">'
            text = f'<!doctype html>{refresh}<a href="{target}">{node.label}</a>\n'
            try:
                storage.write_atomic(url, text.encode())
            except (PonenteError, OSError):
                url = page
            pages.append((node.label, url))
    return pages
