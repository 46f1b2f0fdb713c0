"""How many HTTP requests each verb sends to a store, and the seconds they take.

    python -m tests.bench.request_counts                           counts, at a store that is near
    python -m tests.bench.request_counts --latency-ms 0 50 --shards 100    and at one that is far
    python -m tests.bench.request_counts --stores own --log requests.jsonl what was asked for

One JSON object a measurement on stdout, a table on stderr. Each is one process of the command line
that users type, steps executed inline: `cold` runs the graph in an empty store, `plan`, `noop` (a
run), `verify` and `gc` look at the finished one. `steps` is twenty tiny steps of one shard,
`shards` one step of many shards and its consumer (see `request_graphs.py`).

The stores: `own` is the project's test server, `fake-gcs-server` a server of others; clients send
the same to both, unless one of them answers differently. `local` is this machine's disk, without
any request. `--latency-ms 50` lets every answer come 50 ms later, and so says what a store far away
costs; new connections and TLS, which cost such a store more, are not delayed. `in_a_row` is how
many such delays one after another explain the seconds over those of the first latency given: what
is sent side by side counts once.

`kinds` count requests as sent, so one tried again counts twice; `refused` counts answers of 400 and
above, most of them an expected "not there". Counts of the same code differ from run to run, those
of LIST most: asked what is at a URL, gcsfs sends a GET and a LIST together and drops the later one,
which may have left by then or not.

Wall seconds are of one process on a machine that may be busy (`load`); at `own` they include that
Python server's work, and a listing there takes longer the more objects there are. A process that
takes longer than `--limit-s` is ended, and its line says `timed_out`, with the requests it had
sent; a cold run that was ended is followed by one without delay and without a line, so that the
other verbs have something to look at.
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
from tests.bench.request_proxy import Noted
from tests.bench.request_servers import PLACES, Missing, Place, kind

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
    """One graph at one place, whose server holds nothing else.

    Args:
        place: entered already.
        graph, shards: see `request_graphs.py`.
        limit: seconds that a process may take.
        scratch: directory for what processes print.
    """

    def __init__(self, place: Place, graph: str, shards: int, limit: float, scratch: Path) -> None:
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
            "measured": "requests",
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
    """Lines of one graph at one place, each with its requests.

    A place that cannot be measured here has one line, which says why.
    """
    with tempfile.TemporaryDirectory(prefix="ponente-requests-") as directory:
        scratch = Path(directory)
        place = PLACES[name](scratch)
        try:
            with place:
                sent = 0
                # A disk has no latency to choose.
                asked = latencies if name != "local" else [0.0]
                for row in Bench(place, graph, shards, limit, scratch).rows(asked):
                    yield row, place.log[sent:]
                    sent = len(place.log)
        except (Missing, TimeoutError) as error:
            yield {"measured": "nothing", "store": name, "graph": graph, "why": str(error)}, []


def table(rows: list[dict[str, Any]]) -> str:
    """The measurements, a verb a line."""
    head = ("store", "graph", "shards", "ms", "verb", "requests", "wall_s", "in_a_row", "kinds")
    lines = [head]
    for row in rows:
        if row["measured"] != "requests":
            lines.append((row["store"], row["graph"], "", "", "not measured:", row["why"]))
            continue
        wall = f">{row['wall_s']:g}" if row["timed_out"] else f"{row['wall_s']:.2f}"
        kinds = ", ".join(f"{count} {name}" for name, count in row["kinds"].items())
        lines.append(
            (row["store"], row["graph"], row["shards"], f"{row['latency_ms']:g}", row["verb"],
             row["requests"], wall, row.get("in_a_row", ""), row.get("error", kinds))
        )  # fmt: skip
    widths = (16, 7, 7, 4, 7, 9, 8, 9, 0)
    return "\n".join(
        " ".join(f"{cell!s:<{width}}" for cell, width in zip(line, widths, strict=False)).rstrip()
        for line in lines
    )


def versions() -> dict[str, Any]:
    """Of everything whose version could matter."""
    found = {**Ponente().versions()}
    found |= {name: version(name) for name in ("gcsfs", "fsspec", "aiohttp")}
    for place in PLACES.values():
        try:
            found |= place.versions()
        except Missing as missing:
            found[place.name] = str(missing)
    return {**found, "cores": os.cpu_count()}


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the status, 1 when something could not be measured."""
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
    print(json.dumps({"measured": "versions", **versions()}), flush=True)
    rows = []
    for graph in options.graphs:
        shards = options.shards if graph == "shards" else 1
        for name in options.stores:
            for row, noted in measure(name, graph, shards, options.latency_ms, options.limit_s):
                rows.append(row)
                print(json.dumps(row), flush=True)
                if options.log:
                    _write_log(options.log, row, noted)
    print(table(rows), file=sys.stderr)
    return int(any("error" in row or row["measured"] == "nothing" for row in rows))


def _write_log(path: Path, row: dict[str, Any], noted: list[Noted]) -> None:
    about = {name: row[name] for name in ("store", "graph", "verb", "latency_ms") if name in row}
    with path.open("a") as file:
        for method, asked, query, status in noted:
            line = {**about, "kind": kind(method, asked, query), "method": method, "path": asked}
            file.write(json.dumps({**line, "query": query, "status": status}) + "\n")


if __name__ == "__main__":
    sys.exit(main())
