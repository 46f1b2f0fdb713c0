"""The demo with every path on gs://, its requests, and the same killed while requests fail.

    python -m tests.bench.gs_pipeline
    python -m tests.bench.gs_pipeline --stores fake-gcs-server --steps 60

One JSON line a run, the first of them local. Documents are two Parquet files of the text that
CPython carries. `whole` is undisturbed and counts requests: by step, and by checkpoint of training.
`killed` is killed with SIGKILL at two moments between a fifth and seven tenths of the length of
`whole`, and run again to the end; at the project's server a share of all requests, `--failing`, is
refused, lost or late. What the runs made is compared with the local run's: content digests of every
step, the final parameters. The run page holds times and is not compared.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data.read.work_units import list_units, read_unit
from data.source import python_documentation
from pipeline.store import storage
from tests.bench.request_proxy import Noted
from tests.bench.request_servers import PLACES, Own, Place
from tests.faults.fake_gcs import Faults
from tests.faults.kill_demo import ROOT, parameters, published

STEP = re.compile(r"runs/([^/]+)-[^/-]{20}/")
CHECKPOINT = re.compile(r"/checkpoints/(\d+)")


def main() -> None:
    """Run locally, then at each store; exits 1 when an output differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stores", nargs="+", default=["own", "fake-gcs-server"])
    parser.add_argument("--failing", type=float, default=0.2, help="share of requests, at own")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    flags = ["--training.steps", str(options.steps), "--training.checkpoint-every", "10"]
    good = True
    with tempfile.TemporaryDirectory(prefix="gs_pipeline-") as scratch:
        write(f"{scratch}/documents")
        row = whole("local", f"{scratch}/documents", f"{scratch}/runs", flags, {})
        reference = made(f"{scratch}/runs")
        print(json.dumps(row), flush=True)
        for name in options.stores:
            with PLACES[name](Path(scratch)) as place:
                for row in at(place, f"{scratch}/documents", flags, options):
                    row["equal"] = row.pop("made") == reference
                    good = good and row["equal"] and row["exit"] == 0
                    print(json.dumps(row), flush=True)
    sys.exit(0 if good else 1)


def at(place: Place, documents: str, flags: list[str], options: argparse.Namespace) -> list[dict]:
    """Rows of a whole and of a killed run at one store."""
    os.environ.update(place.environment())
    for path in Path(documents).iterdir():
        with storage.open_write(place.url(f"documents/{path.name}")) as file:
            file.write(path.read_bytes())
    source = place.url("documents")
    first = whole(place.name, source, place.url("whole/runs"), flags, place.environment())
    first |= requests(place.log) | {"made": made(place.url("whole/runs"))}
    if isinstance(place, Own):
        place.fail(Faults(probability=options.failing, seed=options.seed))
    draw = random.Random(options.seed)
    moments = [draw.uniform(0.2, 0.7) * first["seconds"] for _ in range(2)]
    second = killed(place.name, source, place.url("killed/runs"), flags, place, moments)
    if isinstance(place, Own):
        second["failing"] = options.failing
        place.fail(Faults())
    return [first, second | {"made": made(place.url("killed/runs"))}]


def write(directory: str) -> None:
    """Two Parquet files of CPython's text."""
    rows = pa.Table.from_batches(
        [
            batch
            for unit in list_units(python_documentation())
            for batch in read_unit(unit, ("id", "text"))
        ]
    )
    os.makedirs(directory)
    half = rows.num_rows // 2
    pq.write_table(rows.slice(0, half), f"{directory}/0.parquet")
    pq.write_table(rows.slice(half), f"{directory}/1.parquet")


def command(source: str, store: str, flags: list[str]) -> list[str]:
    """The demo's, with its documents and its store in other places."""
    demo = [sys.executable, "experiments/run_200m.py", "--smoke", "--source", source]
    return [*demo, "--prefix", store, *flags]


def whole(name: str, source: str, store: str, flags: list[str], env: Mapping[str, str]) -> dict:
    """An undisturbed run."""
    clock = time.monotonic()
    done = subprocess.run(
        command(source, store, flags), cwd=ROOT, env={**os.environ, **env}, capture_output=True
    )
    if done.returncode:
        sys.stderr.write(done.stdout.decode()[-4000:] + done.stderr.decode()[-4000:])
    seconds = round(time.monotonic() - clock, 1)
    return {"run": "whole", "store": name, "exit": done.returncode, "seconds": seconds}


def killed(
    name: str, source: str, store: str, flags: list[str], place: Place, moments: list[float]
) -> dict:
    """A run that is killed at each moment, counted from its own start, and then left alone."""
    env = {**os.environ, **place.environment()}
    finished = []
    for moment in moments:
        quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        victim = subprocess.Popen(
            command(source, store, flags),
            cwd=ROOT,
            env=env,
            start_new_session=True,
            **quiet,
        )
        time.sleep(moment)
        if victim.poll() is None:
            os.killpg(victim.pid, signal.SIGKILL)
        victim.wait()
        finished.append(sorted(published(store)))
    before = {step: manifest.attempt for step, manifest in published(store).items()}
    row = whole(name, source, store, flags, place.environment())
    after = {step: manifest.attempt for step, manifest in published(store).items()}
    redone = [step for step, attempt in before.items() if after[step] != attempt]
    times = [round(moment, 1) for moment in moments]
    return {**row, "run": "killed", "killed_after_s": times, "finished": finished, "redone": redone}


def made(store: str) -> dict[str, Any]:
    """What is compared: digests of what the steps made, and of the last parameters."""
    contents = {
        step: manifest.result.get("content_digest") or manifest.result.get("digest")
        for step, manifest in published(store).items()
        if step != "report"
    }
    found = b"".join(np.ascontiguousarray(array).tobytes() for array in parameters(store))
    return {**contents, "parameters": hashlib.sha256(found).hexdigest()}


def requests(log: list[Noted]) -> dict[str, Any]:
    """How many there were in all, by step, and by checkpoint."""
    steps: Counter[str] = Counter()
    checkpoints: Counter[str] = Counter()
    for _, path, query, _ in log:
        name = unquote(path) + " " + " ".join(query.get(key, "") for key in ("name", "prefix"))
        if found := STEP.search(name):
            steps[found[1]] += 1
        if found := CHECKPOINT.search(name):
            checkpoints[found[1]] += 1
    each = sum(checkpoints.values()) / max(1, len(checkpoints))
    return {
        "requests": len(log),
        "by_step": dict(steps),
        "by_checkpoint": round(each, 1),
        "checkpoints": len(checkpoints),
    }


if __name__ == "__main__":
    main()
