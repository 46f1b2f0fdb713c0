"""The toy graphs as a script of Marin's: `python engine_marin.py {run,plan} GRAPH [CONCURRENT]`.

Run by the interpreter of an environment that has marin-core, as a file, so that nothing of this
project but the two modules beside it is imported. `MARIN_PREFIX` is the store.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import engine_clock
import engine_graphs

VERSION = "2026.11.21"


def toy(task: str, salt: int, parents: list[str], output_path: str) -> None:
    """Write the line of one task."""
    files = [os.path.join(parent, engine_graphs.OUTPUT) for parent in parents]
    engine_graphs.perform(task, salt, files, output_path)


def _main(verb: str, graph: str, concurrent: str = "8") -> None:
    with engine_clock.importing():
        from marin.execution import lazy
        from marin.execution.step_runner import StepRunner
        from rigging.provenance import Provenance
    steps: dict[str, Any] = {}
    for task in engine_graphs.tasks(graph):
        steps[task.name] = lazy.apply(
            f"toy/{task.name}",
            toy,
            version=VERSION,
            task=task.name,
            salt=task.salt,
            parents=[steps[parent] for parent in task.parents],
            output_path=lazy.OUT,
        )
    wanted = [steps[name] for name in engine_graphs.targets(graph)]
    if verb == "plan":
        # With one memo for all targets, as in `lazy.run`: `lazy.lower` walks the graph for each.
        provenance, memo = Provenance.capture(), {}
        specs = [lazy._lower(step, provenance, memo) for step in wanted]
        StepRunner().run(specs, dry_run=True)
    else:
        lazy.run(*wanted, max_concurrent=int(concurrent))


if __name__ == "__main__":
    _main(*sys.argv[1:])
