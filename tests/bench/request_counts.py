"""How many HTTP requests each verb sends to a store, and the seconds they take.

    python -m tests.bench.request_counts                           counts, at a store that is near
    python -m tests.bench.request_counts --latency-ms 0 50 --shards 100    and at one that is far
    python -m tests.bench.request_counts --stores own --log requests.jsonl what was asked for

One JSON object a measurement. Each is one process of the command line, steps executed inline:
`cold` runs the graph in an empty store, `plan`, `noop` (a run), `verify` and `gc` look at the
finished one. `steps` is twenty tiny steps of one shard, `shards` one step of many shards and its
consumer (`request_graphs.py`). The stores are the project's test server and the local disk.

`--latency-ms 50` lets every answer come 50 ms later; new connections and TLS are not delayed.
`in_a_row` is how many such delays one after another explain the seconds over those of the first
latency. `kinds` count requests as sent, so one tried again counts twice; `refused` counts answers
of 400 and above, most of them an expected "not there". Counts of LIST differ from run to run:
gcsfs sends a GET and a LIST together and drops the later one, which may have left by then.

A process that takes longer than `--limit-s` is ended and `timed_out`; a cold run that was ended is
followed by one without delay and without a line, so that the other verbs have a finished store.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.bench import request_graphs
from tests.bench.engine_process import Ended, Running
from tests.bench.engine_systems import ROOT, Ponente
from tests.bench.request_servers import PLACES, Disk, Noted, kind

VERBS = {"cold": "run", "plan": "plan", "noop": "run", "verify": "verify", "gc": "gc"}
_FILL_SECONDS = 300.0
_SETTLE_SECONDS = 0.2


def counted(requests: Iterable[Noted]) -> dict[str, Any]:
    """How many requests there were: in all, by kind, and by the status of a refusal."""
    requests = list(requests)
    kinds = Counter(kind(method, path, query) for method, path, query, _ in requests)
    refused = Counter(str(status) for *_, status in requests if status >= 400)
    return {
        "requests": len(requests),
        "kinds": dict(kinds.most_common()),
        "refused": dict(sorted(refused.items())),
    }


def outcome(ended: Ended | None, limit: float) -> dict[str, Any]:
    """How a process ended; None is one that had to be ended after `limit` seconds."""
    if ended is None:
        return {"wall_s": limit, "cpu_s": None, "timed_out": True}
    found = {"wall_s": round(ended.whole, 2), "cpu_s": round(ended.cpu, 2), "timed_out": False}
    if ended.code:
        found["error"] = f"status {ended.code}: {' '.join(ended.lines)[-300:]}"
    return found


class Bench:
    """One graph at one place, which is entered and holds nothing else; `limit` in seconds."""

    def __init__(self, place: Disk, graph: str, shards: int, limit: float, scratch: Path) -> None:
        self._place, self._graph, self._shards = place, graph, shards
        self._limit, self._scratch = limit, scratch

    def rows(self, latencies: list[float]) -> Iterator[dict[str, Any]]:
        """A line for each latency (in milliseconds) and verb."""
        first: dict[str, dict[str, Any]] = {}
        finished = ""
        for latency in latencies:
            for verb in VERBS:
                name = f"store-{latency:g}" if verb == "cold" else finished
                row = self._row(verb, name, latency)
                if verb == "cold":
                    if row["timed_out"] and not finished:
                        finished = self._fill()
                    finished = finished or name
                before = first.setdefault(verb, row)
                yield row | _in_a_row(before, row)

    def _row(self, verb: str, name: str, latency: float) -> dict[str, Any]:
        self._place.delay(latency / 1000)
        sent = len(self._place.log)
        ended = self._run(verb, name, self._limit)
        # What a client no longer waits for when it ends is noted as late as it is answered.
        time.sleep(latency / 1000 + _SETTLE_SECONDS)
        return {
            "store": self._place.name,
            "graph": self._graph,
            "steps": request_graphs.STEPS[self._graph],
            "shards": self._shards,
            "verb": verb,
            "latency_ms": latency,
            **outcome(ended, self._limit),
            **counted(self._place.log[sent:]),
            "load": round(os.getloadavg()[0], 1),
        }

    def _run(self, verb: str, name: str, limit: float) -> Ended | None:
        """Start the command line of a verb and wait; None when it took longer than `limit`."""
        script = Path(request_graphs.__file__)
        command = [sys.executable, str(script), VERBS[verb], "--prefix", self._place.url(name)]
        environment = {
            **self._place.environment(),
            **request_graphs.environment(self._graph, self._shards),
            "PYTHONPATH": str(ROOT),  # started elsewhere, it must still use this checkout
        }
        if VERBS[verb] == "run":
            command += ["--executor", "inline"]
        process = Running(command, environment, self._scratch, self._scratch / "output")
        try:
            return process.wait(limit)
        except TimeoutError:
            return None

    def _fill(self) -> str:
        """Finish a store that answers at once."""
        self._place.delay(0)
        if self._run("cold", "store", _FILL_SECONDS) is None:
            raise TimeoutError(f"{self._place.name}: no cold run within {_FILL_SECONDS:g} s")
        return "store"


def _in_a_row(first: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    """How many delays one after another the seconds over those of the first latency are."""
    delay = row["latency_ms"] - first["latency_ms"]
    if delay <= 0 or row["timed_out"] or first["timed_out"] or not row["requests"]:
        return {}
    return {"in_a_row": max(0, round((row["wall_s"] - first["wall_s"]) / (delay / 1000)))}


def measure(
    name: str, graph: str, shards: int, latencies: list[float], limit: float
) -> Iterator[tuple[dict[str, Any], list[Noted]]]:
    """Lines of one graph at one place, each with its requests."""
    with tempfile.TemporaryDirectory(prefix="ponente-requests-") as directory:
        scratch = Path(directory)
        with PLACES[name](scratch) as place:
            sent = 0
            asked = latencies if name != "local" else [0.0]
            for row in Bench(place, graph, shards, limit, scratch).rows(asked):
                yield row, place.log[sent:]
                sent = len(place.log)


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the status, 1 when a process failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.request_counts")
    parser.description, parser.formatter_class = __doc__, argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--stores", nargs="+", choices=list(PLACES), default=list(PLACES))
    add("--graphs", nargs="+", choices=list(request_graphs.STEPS), default=["steps", "shards"])
    add("--shards", type=int, default=1000, help="of the wide step")
    add("--latency-ms", nargs="+", type=float, default=[0.0], help="added to every answer")
    add("--limit-s", type=float, default=120.0, help="seconds that a process may take")
    add("--log", type=Path, help="file for a JSON line a request")
    options = parser.parse_args(arguments)
    if options.log:
        options.log.write_text("")
    versions = Ponente().versions() | {name: version(name) for name in ("gcsfs", "aiohttp")}
    print(json.dumps({**versions, "cores": os.cpu_count()}), flush=True)
    failed = False
    for graph in options.graphs:
        shards = options.shards if graph == "shards" else 1
        for name in options.stores:
            for row, noted in measure(name, graph, shards, options.latency_ms, options.limit_s):
                failed |= "error" in row
                print(json.dumps(row), flush=True)
                if options.log:
                    _write_log(options.log, row, noted)
    return int(failed)


def _write_log(path: Path, row: dict[str, Any], noted: list[Noted]) -> None:
    about = {name: row[name] for name in ("store", "graph", "verb", "latency_ms")}
    with path.open("a") as file:
        for method, asked, query, status in noted:
            line = {**about, "kind": kind(method, asked, query), "method": method, "path": asked}
            file.write(json.dumps({**line, "query": query, "status": status}) + "\n")


if __name__ == "__main__":
    sys.exit(main())
