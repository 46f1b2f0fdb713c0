"""Requests, seconds and memory of the dashboard over a store of many runs.

    python -m tests.bench.dashboard --runs 1000 --latency 0.03

The store is the project's gs:// server in this process, the dashboard another process; three of the
runs are in progress. Prints a table.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from pathlib import Path

from pipeline.store import run_summary, storage
from tests.bench.request_servers import kind
from tests.faults.fake_gcs import FakeGCS, Faults
from tests.pipeline.execute import run_logs
from tests.pipeline.execute.run_logs import START

PREFIX = "gs://bucket/store"
LIVE = 3


def names(count: int) -> list[str]:
    return [
        f"2026{1 + i // 800:02d}{1 + i // 30 % 27:02d}T{i % 30:02d}0000Z-{i:06x}"
        for i in range(count)
    ]


def fill(count: int, scratch: Path) -> list[str]:
    """A store of so many runs, the newest `LIVE` of which are in progress; returns the names."""
    runs = names(count)
    run_logs.clean_run(str(scratch), "RUN", START, reused=3)
    run_logs.summarise(str(scratch), "RUN")
    files = {each.name: each.read_bytes() for each in (scratch / "events").iterdir()}
    summary = files["RUN.json"].replace(str(scratch).encode(), PREFIX.encode())
    log = files["RUN.jsonl"].replace(str(scratch).encode(), PREFIX.encode())
    for at, run in enumerate(runs):
        live = at >= count - LIVE
        own = (log.rsplit(b"\n", 2)[0] + b"\n" if live else log).replace(b"RUN", run.encode())
        storage.write_atomic(storage.join(run_summary.log_url(PREFIX, run), "000001.txt"), own)
        if live:
            summarise(run, own)
        else:
            storage.write_atomic(
                run_summary.summary_url(PREFIX, run), summary.replace(b"RUN", run.encode())
            )
    for output in scratch.glob("*/manifest.json"):
        storage.write_atomic(f"{PREFIX}/{output.parent.name}/manifest.json", output.read_bytes())
    return runs


def summarise(run: str, log: bytes) -> None:
    """A live run's summary, by the driver of another host."""
    run_logs.summarise(PREFIX, run)
    data = storage.read_bytes(run_summary.summary_url(PREFIX, run))
    data = re.sub(rb'"host": ?"[^"]*"', b'"host": "elsewhere boot ns"', data)
    storage.write_atomic(run_summary.summary_url(PREFIX, run), data)


def grow(run: str, part: int) -> None:
    """One more part of a run's log."""
    line = b'{"time": %d, "event": "progress", "step": "report", "key": "%s", '
    line += b'"done": %d, "total": 9, "unit": "steps", "note": ""}\n'
    key = run_logs.key("report").encode()
    url = storage.join(run_summary.log_url(PREFIX, run), f"{part:06d}.txt")
    storage.write_atomic(url, line % (START + 500 + part, key, part))


class Dashboard:
    """The verb, in a process of its own."""

    def __init__(self, server: FakeGCS) -> None:
        command = [sys.executable, "-m", "steps.cli", "dashboard", PREFIX, "--port", "0"]
        environment = {**os.environ, **server.environment()}
        self._process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.url = re.search(r"http://\S+/", self._process.stdout.readline())[0]
        self._server = server

    def get(self, path: str, tag: str = "") -> tuple[int, str, float, Counter[str]]:
        """(bytes, ETag, seconds, requests to the store by kind) of a page."""
        before, clock = len(self._server.log), time.perf_counter()
        request = urllib.request.Request(
            self.url + path, headers={"If-None-Match": tag} if tag else {}
        )
        try:
            with urllib.request.urlopen(request) as answer:
                size, tag = len(answer.read()), answer.headers["ETag"]
        except urllib.error.HTTPError as answer:
            size, tag = 0, answer.headers["ETag"]
        took = time.perf_counter() - clock
        return size, tag, took, Counter(kind(*each[:3]) for each in self._server.log[before:])

    def memory(self) -> float:
        """The most memory that it has had, in MB."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(re.search(r"VmHWM:\s*(\d+)", status)[1]) / 1000

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--runs", type=int, default=1000)
    flags.add_argument("--latency", type=float, default=0.03, help="seconds of each request")
    given = flags.parse_args()
    with tempfile.TemporaryDirectory() as scratch, FakeGCS() as server:
        runs = fill(given.runs, Path(scratch))
        server.faults = Faults(latency_seconds=given.latency)
        dashboard = Dashboard(server)
        tags: dict[str, str] = {}

        def row(what: str, path: str) -> None:
            size, tags[path], took, asked = dashboard.get(path, tags.get(path, ""))
            each = ", ".join(f"{n} {name}" for name, n in sorted(asked.items())) or "none"
            print(f"{what:<38} {size:>9,} B {took:6.2f} s  {sum(asked.values()):>4}  {each}")

        try:
            print(f"at the start: {dashboard.memory():.0f} MB")
            row("the index, first", "reports/index.html")
            row("again at once", "reports/index.html")
            time.sleep(4.2)
            row("after 4 s, nothing new", "reports/index.html")
            grow(runs[-1], 2)
            time.sleep(4.2)
            row("after 4 s, one log has grown", "reports/index.html")
            row("its second page", "reports/index.html?page=2")
            row("a run, first", f"reports/{runs[5]}.html")
            time.sleep(4.2)
            row("a run, after 4 s", f"reports/{runs[5]}.html")
            for page in range(3, -(-given.runs // 100) + 1):
                dashboard.get(f"reports/index.html?page={page}")
            print(f"all pages of the index were read: {dashboard.memory():.0f} MB")
        finally:
            dashboard.close()


if __name__ == "__main__":
    main()
