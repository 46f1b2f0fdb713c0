"""Pages of a run's targets under short paths that stay the same from run to run."""

from __future__ import annotations

from pipeline.cli.context import Context
from pipeline.errors import PonenteError
from pipeline.execute.executor import Execution
from pipeline.graph.declaration import FULL
from pipeline.store import storage


def copy_pages(context: Context, execution: Execution) -> list[tuple[str, str]]:
    """(label, URL) of every target that has a page: `reports/EXPERIMENT[-PRESET]/LABEL.html`.

    A page that cannot be written never fails the run; the URL is then the output's own.
    """
    assert context.experiment is not None
    folder = context.experiment.name + (f"-{context.preset}" if context.preset != FULL else "")
    found = []
    for node in execution.targets:
        there = execution.published[node.key]
        page = node.output(there.path, there.manifest).page
        if page:
            url = storage.join(context.store.prefix, "reports", folder, f"{node.label}.html")
            try:
                storage.write_atomic(url, storage.read_bytes(page))
            except (PonenteError, OSError):
                url = page
            found.append((node.label, url))
    return found
