"""How long `status` of one long run takes, and how many requests it sends.

    python -m tests.bench.run_status                        a run of ten days
    python -m tests.bench.run_status --checkout ../before   and by the code of another checkout

One JSON object a measurement on stdout. The run logs every ten seconds, as a training does, and
still goes on: `layout` says how its log lies in the store. `file` is a local one; `parts` has an
object for each upload and no summary, as stores of before do; `merged` is what the driver leaves
now, with a summary that is a minute old. `gs` is the project's test server, whose answers come
`--latency-ms` later. Each measurement is one process of the command line, ended after `--limit-s`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pipeline.pages.record import Follower
from pipeline.store import run_summary, storage
from pipeline.store.append import Appender
from tests.bench.engine_systems import ROOT
from tests.faults.fake_gcs import FakeGCS, Faults
from tests.faults.fake_gcs_store import Stored

RUN = "20260101-000000-aaaaaa"
_STEP = {"step": "sleeper", "key": "0" * 64}
_SINCE_SUMMARY = 6  # parts
LAYOUTS = ("file", "parts", "merged")
EXPERIMENT = """
from pipeline import Artifact, Experiment, step

@step(output=Artifact, version=1)
def sleeper(run, *, n: int = 1):
    return {}

def long(n: int = 1):
    return sleeper(n=n)

experiment = Experiment(long)
"""


def lines(parts: int) -> Iterator[bytes]:
    """What each upload has: the beginning of the run, then its progress."""
    now = time.time() - 10 * parts
    graph = [{"label": "sleeper", "key": _STEP["key"], "directory": "sleeper-0"}]
    begin = {"event": "run_started", "experiment": "long", "command": ["long.py"], "graph": graph}
    events = [begin, {"event": "started", "attempt": "000001-a", **_STEP}]
    for number in range(parts):
        at = {"event": "progress", "done": number, "total": parts, "unit": "steps", **_STEP}
        text = "loss 3.141  123,456 tokens/s"
        events += [{**at, "note": text}, {**at, "done": number + 0.5, "note": text}]
        yield b"".join(json.dumps({"time": now, **each}).encode() + b"\n" for each in events)
        now, events = now + 10, []


def merged(url: str, parts: int) -> None:
    """Upload the log in parts, as the driver does, and its summary shortly before the end."""
    prefix = url.partition("/events/")[0]
    uploads = Appender(url)
    for number, text in enumerate(lines(parts)):
        uploads.write(text)
        uploads.flush()
        if number == parts - _SINCE_SUMMARY:
            Follower(prefix, RUN).save()
    uploads.close()


def fill(server: FakeGCS, layout: str, parts: int) -> str:
    """Put a log into the server, without a request for each object; returns the store's URL."""
    memory = f"memory://{uuid.uuid4().hex}"
    if layout == "merged":
        merged(run_summary.log_url(memory, RUN), parts)
        found = [name for name, _ in storage.list_files(memory)]
        objects = {name: storage.read_bytes(f"{memory}/{name}") for name in found}
    else:
        folder = f"events/{RUN}.jsonl"
        objects = {f"{folder}/{n + 1:06d}.txt": text for n, text in enumerate(lines(parts))}
    bucket, stamp = server.buckets["bucket"], time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime())
    for name, data in objects.items():
        bucket[f"{layout}/{name}"] = Stored(f"{layout}/{name}", data, 1, 0, updated=stamp)
    return f"gs://bucket/{layout}"


def measure(checkout: Path, file: Path, prefix: str, limit: float) -> dict[str, Any]:
    """One `status` by the code of a checkout."""
    command = [sys.executable, "-m", "pipeline.cli", "status", str(file), "--prefix", prefix]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    begun = time.monotonic()
    try:
        done = subprocess.run(
            command,
            cwd=checkout,
            env=environment,
            capture_output=True,
            text=True,
            timeout=limit,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"seconds": limit, "timed_out": True}
    row = {"seconds": round(time.monotonic() - begun, 2), "timed_out": False}
    said = next((line for line in done.stdout.splitlines() if line.startswith("run ")), "")
    return row | {"said": said or done.stderr[-300:]}


def rows(
    checkouts: list[Path],
    parts: int,
    latency: float = 0.0,
    limit: float = 300.0,
    layouts: Sequence[str] = LAYOUTS,
) -> Iterator[Any]:
    """A line for each layout and checkout."""
    with tempfile.TemporaryDirectory() as folder, FakeGCS() as server:
        file = Path(folder, "long.py")
        file.write_text(EXPERIMENT)
        local = f"{folder}/store"
        log = Path(run_summary.log_url(local, RUN))
        log.parent.mkdir(parents=True)
        log.write_bytes(b"".join(lines(parts)))
        places = [(n, local if n == "file" else fill(server, n, parts)) for n in layouts]
        server.faults = Faults(latency_seconds=latency / 1000)
        for layout, prefix in places:
            for number, checkout in enumerate(checkouts):
                if layout == "merged" and number:
                    continue  # the code of before cannot read it
                if layout == "file" and not number:
                    Follower(local, RUN).save()
                sent = server.requests
                row = measure(checkout, file, prefix, limit)
                about = {"measured": "status", "layout": layout, "checkout": checkout.name}
                about |= {"parts": parts, "latency_ms": latency}
                yield about | row | {"requests": server.requests - sent}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--parts", type=int, default=86_400, help="uploads of the run")
    parser.add_argument("--latency-ms", type=float, default=0.0)
    parser.add_argument("--limit-s", type=float, default=300.0)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=LAYOUTS)
    parser.add_argument("--checkout", type=Path, action="append", default=[])
    options = parser.parse_args()
    checkouts = [ROOT, *(path.resolve() for path in options.checkout)]
    shape = (options.parts, options.latency_ms, options.limit_s, options.layouts)
    for row in rows(checkouts, *shape):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
