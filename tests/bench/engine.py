"""Seconds of the step engine on toy graphs, and what it does when it is disturbed.

    python -m tests.bench.engine
    python -m tests.bench.engine --graphs 2 20 --repeat 3 --no-behaviours     quickly

One JSON object a measurement on stdout, a table on stderr. Seconds are of the whole process, and
`own` from its script's first line to its end, of which `import` went into importing the engine.
A cold run starts from an empty store, a no-op from a finished one. `changed` means: the first step
has another configuration, all else is equal. The work of a step is two small files read and one
written (`engine_graphs.toy`), in the order of the graph inline, or on Ray, whose start is in
its times. Each process finds a git repository to ask for provenance. Times are of one machine and
say little alone; `load` is how busy it was.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.graph.order import topological
from pipeline.store import manifest
from tests.bench import engine_graphs
from tests.bench.engine_graphs import CHANGED, PAUSED, Line, experiment
from tests.bench.engine_process import Ended, Running, wait_for_line

ROOT = Path(__file__).parents[2]
_LARGE = 100  # steps; above it cold runs are repeated less
_GRAPH = "20"  # the one that Ray and the behaviours are tried on
# The processes run elsewhere and must use this checkout.
ENVIRONMENT = {"PYTHONPATH": str(ROOT)}


def command(verb: str, graph: str, store: Path, executor: str = "inline") -> list[str]:
    """The experiment file `engine_ours.py`, as a user would run it."""
    flags = ["--preset", graph, "--prefix", str(store), "--executor", executor]
    return [sys.executable, "-m", "tests.bench.engine_ours", verb, *flags]


@functools.cache
def _directories(graph: str) -> dict[str, str]:
    return {node.label: node.directory for node in topological(experiment.graph(graph))}


def output(graph: str, step: str, store: Path) -> Path:
    """The directory of a finished step's files. Raises `FileNotFoundError` if there is none."""
    directory = str(store / _directories(graph)[step])
    published = manifest.load(directory)
    if published is None:
        raise FileNotFoundError(directory)
    return Path(Line(directory, published).file).parent


def lines_are_right(graph: str, store: Path) -> bool:
    """Whether the last layer holds what `engine_graphs.evaluate` says; False when it is absent."""
    expected = engine_graphs.evaluate(graph)
    try:
        found = {
            name: (output(graph, name, store) / engine_graphs.OUTPUT).read_text()
            for name in engine_graphs.targets(graph)
        }
    except FileNotFoundError:
        return False
    return found == {name: expected[name] for name in found}


@functools.cache
def _versions() -> dict[str, str]:
    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
        return done.stdout.strip()

    changed = "+changes" if git("status", "--porcelain") else ""
    return {
        "python": platform.python_version(),
        "ponente": (git("rev-parse", "--short=10", "HEAD") or "no git") + changed,
        "ray": importlib.metadata.version("ray"),
    }


class Bench:
    """Runs measurements in a scratch directory and prints what comes out."""

    def __init__(self, scratch: Path, repeat: int, repeat_large: int) -> None:
        self.records: list[dict[str, Any]] = []
        self._scratch = scratch
        self._where = scratch / "where"
        self._repeat, self._repeat_large = repeat, repeat_large
        self._stores = 0
        self._where.mkdir()
        subprocess.run(["git", "init", "-q", str(self._where)], check=False)
        author = ["-c", "user.name=bench", "-c", "user.email=bench@localhost"]
        commit = ["commit", "-q", "--allow-empty", "-m", "empty"]
        subprocess.run(["git", "-C", str(self._where), *author, *commit], check=False)

    def store(self) -> Path:
        self._stores += 1
        return self._scratch / f"store-{self._stores}"

    def start(
        self,
        verb: str,
        graph: str,
        store: Path,
        executor: str = "inline",
        environment: Mapping[str, str] | None = None,
    ) -> Running:
        asked = command(verb, graph, store, executor)
        return self._running(asked, {**ENVIRONMENT, **(environment or {})})

    def _running(self, asked: list[str], environment: Mapping[str, str]) -> Running:
        return Running(asked, environment, self._where, self._scratch / "output")

    def emit(self, measure: str, **fields: Any) -> None:
        about = {"cpus": os.cpu_count(), "load": round(os.getloadavg()[0], 2)}
        record = {"measure": measure, **fields, "versions": _versions(), **about}
        self.records.append(record)
        print(json.dumps(record), flush=True)

    def timed(self, measure: str, ended: list[Ended], **fields: Any) -> None:
        self.emit(
            measure,
            **fields,
            codes=[e.code for e in ended],
            whole_s=_summary([e.whole for e in ended]),
            own_s=_summary([e.own for e in ended]),
            import_s=_summary([e.imported for e in ended]),
            cpu_s=_summary([e.cpu for e in ended]),
        )

    def interpreter(self) -> None:
        asked = [sys.executable, "-c", "pass"]
        ended = [self._running(asked, {}).wait() for _ in range(self._repeat)]
        self.emit("interpreter alone", whole_s=_summary([e.whole for e in ended]))

    def times(self, graph: str) -> None:
        """Cold, no-op and plans of one graph."""
        steps = len(engine_graphs.tasks(graph))
        store = self.cold(graph, "inline")
        if graph == _GRAPH:
            shutil.rmtree(self.cold(graph, "ray"))
        empty = self.store()
        for measure, verb, name, where in (
            ("no-op", "run", graph, store),
            ("plan, up to date", "plan", graph, store),
            ("plan, empty store", "plan", graph, empty),
            ("plan, changed", "plan", graph + CHANGED, store),
        ):
            ended = [self.start(verb, name, where).wait() for _ in range(self._repeat)]
            self.timed(measure, ended, graph=graph, steps=steps, printed=printed(ended[-1]))
        shutil.rmtree(store)

    def cold(self, graph: str, executor: str) -> Path:
        steps = len(engine_graphs.tasks(graph))
        ended, store = [], self.store()
        for turn in range(self._repeat_large if steps > _LARGE else self._repeat):
            if turn:
                shutil.rmtree(store)
                store = self.store()
            ended.append(self.start("run", graph, store, executor).wait())
        correct = lines_are_right(graph, store)
        files = sum(path.is_file() for path in store.rglob("*"))
        about = {"graph": graph, "steps": steps, "executor": executor}
        self.timed("cold", ended, **about, correct=correct, files=files)
        return store

    def changed(self) -> None:
        store = self.store()
        self.start("run", _GRAPH, store).wait()
        ended = self.start("run", _GRAPH + CHANGED, store).wait()
        self.emit(
            "behaviour: configuration of the first step changed",
            graph=_GRAPH,
            code=ended.code,
            correct=lines_are_right(_GRAPH + CHANGED, store),
            whole_s=_summary([ended.whole]),
            printed=printed(ended),
        )

    def killed(self) -> None:
        """SIGKILL in the middle of a step, then the same command again."""
        store, marks = self.store(), self._scratch / f"marks-{self._stores}"
        pause = {"TOY_PAUSE_STEP": PAUSED, "TOY_PAUSE_SECONDS": "600"}
        environment = {"TOY_MARKS": str(marks), **pause}
        running = self.start("run", _GRAPH, store, environment=environment)
        wait_for_line(marks, PAUSED)
        time.sleep(0.5)
        running.kill()
        running.wait()
        before = list(store.rglob(f"part-{running.pid}.txt"))
        ended = self.start("run", _GRAPH, store).wait()
        self.emit(
            "behaviour: SIGKILL in a step, run again",
            graph=_GRAPH,
            code=ended.code,
            correct=lines_are_right(_GRAPH, store),
            whole_s=_summary([ended.whole]),
            partial_files_before=len(before),
            partial_files_after=len(list(store.rglob(f"part-{running.pid}.txt"))),
        )

    def raced(self) -> None:
        """Two launchers of the same graph at once, with a step of three seconds."""
        store, marks = self.store(), self._scratch / f"marks-{self._stores}"
        environment = {"TOY_MARKS": str(marks), "TOY_PAUSE_STEP": PAUSED, "TOY_PAUSE_SECONDS": "3"}
        both = [self.start("run", _GRAPH, store, environment=environment) for _ in range(2)]
        ended = [running.wait() for running in both]
        ran = marks.read_text().split()
        self.emit(
            "behaviour: two launchers at once",
            graph=_GRAPH,
            codes=[e.code for e in ended],
            correct=lines_are_right(_GRAPH, store),
            bodies_run=len(ran),
            steps=len(engine_graphs.tasks(_GRAPH)),
            whole_s=_summary([e.whole for e in ended]),
        )


def _summary(values: list[float]) -> dict[str, Any]:
    rounded = [round(value, 4) for value in values]
    return {"min": min(rounded), "median": round(statistics.median(values), 4), "values": rounded}


def printed(ended: Ended, count: int = 3) -> list[str]:
    return [line[:200] for line in ended.lines if line.strip()][-count:]


def table(records: list[dict[str, Any]]) -> str:
    """The measurements for people: whole and own seconds as min / median."""
    rows = [("measure", "graph", "whole", "own", "import", "what came out")]
    shown = ("executor", "code", "codes", "correct", "partial_files_after", "bodies_run")
    for record in records:
        clocks = [
            f"{record[clock]['min']:.2f} / {record[clock]['median']:.2f}" if clock in record else ""
            for clock in ("whole_s", "own_s", "import_s")
        ]
        facts = ", ".join(f"{name} {record[name]}" for name in shown if name in record)
        rows.append((record["measure"], record.get("graph", ""), *clocks, facts))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--graphs", nargs="*", default=list(engine_graphs.SHAPES))
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--repeat-large", type=int, default=1, help="cold runs of 1,000 steps")
    parser.add_argument("--no-behaviours", action="store_true")
    options = parser.parse_args()
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory(prefix="engine-") as scratch:
        bench = Bench(Path(scratch), options.repeat, options.repeat_large)
        bench.interpreter()
        for graph in options.graphs:
            bench.times(graph)
        if not options.no_behaviours:
            bench.changed()
            bench.killed()
            bench.raced()
    print(table(bench.records), file=sys.stderr)


if __name__ == "__main__":
    main()
