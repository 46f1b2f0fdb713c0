"""Our step engine beside Marin's executor on the same toy graphs.

    python -m tests.bench.engine --marin-python DIR/bin/python
    python -m tests.bench.engine --setup-marin DIR        make that environment first (Python 3.12)
    python -m tests.bench.engine --graphs 2 20 --repeat 3  ours alone, quickly

One JSON object a measurement on stdout, a table on stderr. Seconds are of the whole process, and
`own` from its script's first line to its end, of which `import` went into importing the engine.
A cold run starts from an empty store, a no-op from a finished one; `plan` is our verb of that name
and Marin's dry run. `changed` means: the first step has another configuration, all else is equal.

The work of a step is the same function for both (`engine_graphs.perform`): read two small files,
write one. Around it they do different things, and the times are to be read with that in mind:

- Ours writes a lease, its release, a shard record, a manifest, an index entry and a log a step, the
  two records with fsync, takes the SHA-256 of every file of the step, and checks a finished step's
  key and file sizes on every look. The in-process executor runs one step after another; Ray's start
  is in the times given for Ray. The plan reads the store and says what changed.
- Marin's writes an information file, a record and a status a step, and a lock while it runs,
  without fsync and without a digest of any file. `run` (as its users call it) has eight threads and
  looks for finished steps once a second; 64 threads are measured too, on the large graph. A
  finished target is taken at its status alone, and nothing below it is looked at. The dry run does
  not look at the store. Its version strings are kept equal throughout, as by a user who forgets to
  raise them.

Both find a git repository to ask for provenance. Times are of one machine and say little alone;
`load` is how busy it was.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.bench import engine_graphs
from tests.bench.engine_graphs import CHANGED, PAUSED
from tests.bench.engine_process import Ended, Running, wait_for_line
from tests.bench.engine_systems import ROOT, Marin, Ponente, System, lines, setup_marin

_LARGE = 100  # steps; above it cold runs are repeated less and looked at with more threads
_GRAPH = "20"  # the one behaviours are tried on


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
        """A new empty store."""
        self._stores += 1
        return self._scratch / f"store-{self._stores}"

    def start(
        self,
        system: System,
        verb: str,
        graph: str,
        store: Path,
        executor: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Running:
        """Start one process of a system."""
        return Running(
            system.command(verb, graph, store, executor or system.executors[0]),
            {**system.environment(store), **(environment or {})},
            self._where,
            self._scratch / "output",
        )

    def emit(self, system: System, measure: str, **fields: Any) -> None:
        """Print one measurement."""
        record = {
            "system": system.name,
            "measure": measure,
            **fields,
            "versions": system.versions(),
            "cpus": os.cpu_count(),
            "load": round(os.getloadavg()[0], 2),
        }
        self.records.append(record)
        print(json.dumps(record), flush=True)

    def timed(self, system: System, measure: str, ended: list[Ended], **fields: Any) -> None:
        """Print the times of several equal processes."""
        self.emit(
            system,
            measure,
            **fields,
            codes=[e.code for e in ended],
            whole_s=_summary([e.whole for e in ended]),
            own_s=_summary([e.own for e in ended]),
            import_s=_summary([e.imported for e in ended]),
            cpu_s=_summary([e.cpu for e in ended]),
        )

    def interpreter(self, system: System) -> None:
        """What a process costs that does nothing."""
        command = [system.interpreter(), "-c", "pass"]
        output = self._scratch / "output"
        ended = [Running(command, {}, self._where, output).wait() for _ in range(self._repeat)]
        self.emit(system, "interpreter alone", whole_s=_summary([e.whole for e in ended]))

    def times(self, system: System, graph: str) -> None:
        """Cold, no-op and plans of one graph."""
        steps = len(engine_graphs.tasks(graph))
        store = self.cold(system, graph, system.executors[0])
        # Starting Ray takes about ten seconds, so one graph is enough; threads matter on the large.
        if graph == _GRAPH if system.name == "ponente" else steps > _LARGE:
            self.discard(self.cold(system, graph, system.executors[1]))
        empty = self.store()
        for measure, verb, name, where in (
            ("no-op", "run", graph, store),
            ("plan, up to date", "plan", graph, store),
            ("plan, empty store", "plan", graph, empty),
            ("plan, changed", "plan", graph + CHANGED, store),
        ):
            ended = [self.start(system, verb, name, where).wait() for _ in range(self._repeat)]
            said = printed(ended[-1])
            self.timed(system, measure, ended, graph=graph, steps=steps, printed=said)
        self.discard(store)

    def cold(self, system: System, graph: str, executor: str) -> Path:
        """Cold runs; returns the store of the last."""
        steps = len(engine_graphs.tasks(graph))
        ended, store = [], self.store()
        for turn in range(self._repeat_large if steps > _LARGE else self._repeat):
            if turn:
                self.discard(store)
                store = self.store()
            ended.append(self.start(system, "run", graph, store, executor).wait())
        self.timed(
            system,
            "cold",
            ended,
            graph=graph,
            steps=steps,
            executor=executor,
            correct=lines_are_right(system, graph, store),
            files=sum(path.is_file() for path in store.rglob("*")),
        )
        return store

    def discard(self, store: Path) -> None:
        """Delete a store."""
        shutil.rmtree(store, ignore_errors=True)

    def changed(self, system: System) -> None:
        """The first step's configuration changes: is the result the new one?"""
        store = self.store()
        self.start(system, "run", _GRAPH, store).wait()
        ended = self.start(system, "run", _GRAPH + CHANGED, store).wait()
        # Ours keeps the old output under its own key, so that both can be there.
        new = lines_are_right(system, _GRAPH + CHANGED, store)
        old = lines_are_right(system, _GRAPH, store)
        self.emit(
            system,
            "behaviour: configuration of the first step changed",
            graph=_GRAPH,
            code=ended.code,
            result="the new one" if new else "the old one" if old else "neither",
            whole_s=_summary([ended.whole]),
            printed=printed(ended),
        )

    def killed(self, system: System) -> None:
        """SIGKILL in the middle of a step, then the same command again."""
        store, marks = self.store(), self._scratch / f"marks-{self._stores}"
        environment = {
            "TOY_MARKS": str(marks),
            "TOY_PAUSE_STEP": PAUSED,
            "TOY_PAUSE_SECONDS": "600",
        }
        running = self.start(system, "run", _GRAPH, store, environment=environment)
        wait_for_line(marks, PAUSED)
        time.sleep(0.5)
        running.kill()
        running.wait()
        before = list(store.rglob(f"part-{running.pid}.txt"))
        ended = self.start(system, "run", _GRAPH, store).wait()
        left = list(store.rglob(f"part-{running.pid}.txt"))
        published = system.output(_GRAPH, PAUSED, store) if ended.code == 0 else None
        self.emit(
            system,
            "behaviour: SIGKILL in a step, run again",
            graph=_GRAPH,
            code=ended.code,
            correct=lines_are_right(system, _GRAPH, store),
            whole_s=_summary([ended.whole]),
            partial_files_before=len(before),
            partial_files_after=len(left),
            partial_files_in_result=sum(path.parent == published for path in left),
        )
        self.discard(store)

    def raced(self, system: System) -> None:
        """Two launchers of the same graph at once, with a step of three seconds."""
        store, marks = self.store(), self._scratch / f"marks-{self._stores}"
        environment = {"TOY_MARKS": str(marks), "TOY_PAUSE_STEP": PAUSED, "TOY_PAUSE_SECONDS": "3"}
        both = [self.start(system, "run", _GRAPH, store, environment=environment) for _ in range(2)]
        ended = [running.wait() for running in both]
        ran = marks.read_text().split()
        self.emit(
            system,
            "behaviour: two launchers at once",
            graph=_GRAPH,
            codes=[e.code for e in ended],
            correct=lines_are_right(system, _GRAPH, store),
            bodies_run=len(ran),
            steps=len(engine_graphs.tasks(_GRAPH)),
            paused_body_run=ran.count(PAUSED),
            whole_s=_summary([e.whole for e in ended]),
        )
        self.discard(store)


def _summary(values: list[float]) -> dict[str, Any]:
    rounded = [round(value, 4) for value in values]
    return {"min": min(rounded), "median": round(statistics.median(values), 4), "values": rounded}


def lines_are_right(system: System, graph: str, store: Path) -> bool:
    """Whether the last layer holds what `engine_graphs.evaluate` says; False when it is absent."""
    expected = engine_graphs.evaluate(graph)
    try:
        found = lines(system, graph, store)
    except FileNotFoundError:
        return False
    return found == {name: expected[name] for name in found}


def printed(ended: Ended, count: int = 3) -> list[str]:
    """The last lines a process printed, shortened."""
    return [line[:200] for line in ended.lines if line.strip()][-count:]


def table(records: list[dict[str, Any]]) -> str:
    """The measurements for people: whole and own seconds as min / median."""
    heads = ("measure", "graph", "system", "whole", "own", "import", "what came out")
    rows = [heads]
    for record in records:
        clocks = [
            f"{record[clock]['min']:.2f} / {record[clock]['median']:.2f}" if clock in record else ""
            for clock in ("whole_s", "own_s", "import_s")
        ]
        told = ("executor", "code", "codes", "correct", "result", "partial_files_after")
        told += ("partial_files_in_result", "bodies_run", "paused_body_run")
        facts = ", ".join(f"{name} {record[name]}" for name in told if name in record)
        rows.append((record["measure"], record.get("graph", ""), record["system"], *clocks, facts))
    rows[1:] = sorted(rows[1:], key=lambda row: (row[0], len(row[1]), row[1]))
    widths = [max(len(row[i]) for row in rows) for i in range(len(heads) - 1)]
    return "\n".join(
        "  ".join([*(text.ljust(width) for text, width in zip(row, widths, strict=False)), row[-1]])
        for row in rows
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--marin-python", help="interpreter of an environment that has marin-core")
    parser.add_argument("--setup-marin", type=Path, metavar="DIR", help="make one there if needed")
    parser.add_argument("--python312", default="python3.12", help="what --setup-marin starts from")
    parser.add_argument("--graphs", nargs="*", default=list(engine_graphs.SHAPES))
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--repeat-large", type=int, default=1, help="cold runs of 1,000 steps")
    parser.add_argument("--no-behaviours", action="store_true")
    return parser.parse_args()


def main() -> None:
    """The command."""
    options = _options()
    os.chdir(ROOT)
    systems: list[System] = [Ponente()]
    python = options.marin_python
    if options.setup_marin:
        python = setup_marin(options.setup_marin.absolute(), options.python312)
    if python:
        systems.append(Marin(python))
    else:
        print("ours only: neither --marin-python nor --setup-marin was given", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="engine-") as scratch:
        bench = Bench(Path(scratch), options.repeat, options.repeat_large)
        for system in systems:
            bench.interpreter(system)
        for graph in options.graphs:
            for system in systems:
                bench.times(system, graph)
        if not options.no_behaviours:
            for trial in (bench.changed, bench.killed, bench.raced):
                for system in systems:
                    trial(system)
    print(table(bench.records), file=sys.stderr)


if __name__ == "__main__":
    main()
