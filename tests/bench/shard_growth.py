"""How the engine's own work grows with the number of shards: cold run, no-op, plan, tidying and gc.

    python -m tests.bench.shard_growth                                1,000, 4,000 and 16,000 shards
    python -m tests.bench.shard_growth --shards 500 2000 --checkout DIR    also another checkout's

One JSON object a measurement on stdout, and one with the growth exponent of each measure: the slope
of log(CPU seconds) over log(shards), 1 for work in proportion. Each verb is a process of its own,
inline, on a step that writes shards of three small files with `map` and a step that reads the
output. What a process costs with one shard is subtracted; what is left below a tenth of a second is
noise and no point of the line (`exponent` is null with fewer than two). `rebuild` is `--force`: it
tidies the replaced shards; `gc` lists what it left, `gc --delete` deletes that. `--checkout`
measures another checkout, with its own environment, in turn with this one, so that both see the
same machine.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_NOISE_SECONDS = 0.1
_GRAPH = """
from pipeline import Artifact, Experiment, Result, StepContext, step
from pipeline.store import storage

def write(directory: str, item: int) -> Result:
    for name in ("a", "b", "c"):
        storage.write_atomic(storage.join(directory, name), b"%d" % item, durable=False)
    return {"item": item}

@step(output=Artifact, version=1)
def shards(run: StepContext, *, count: int) -> Result:
    run.map(write, {f"part/{n:06d}": n for n in range(count)})
    return {}

@step(output=Artifact, version=1)
def read(run: StepContext, shards: Artifact) -> Result:
    return {"count": len(shards.shards("part/"))}

def growth(count: int = 1):
    return read(shards(count=count))

experiment = Experiment(growth)
if __name__ == "__main__":
    experiment.main()
"""
MEASURES = {
    "cold": ["run"],
    "no-op": ["run"],
    "plan": ["plan"],
    "rebuild": ["run", "--force", "shards"],
    "gc": ["gc"],
    "gc --delete": ["gc", "--delete", "--yes"],
}


def measure(checkout: Path, count: int, scratch: Path) -> dict[str, dict[str, float]]:
    """CPU and wall seconds of each verb on one store with `count` shards."""
    script = scratch / "growth.py"
    script.write_text(_GRAPH)
    python = checkout / ".venv/bin/python"
    with tempfile.TemporaryDirectory(dir=scratch) as store:
        found = {}
        for name, (verb, *flags) in MEASURES.items():
            command = [str(python if python.exists() else sys.executable), str(script), verb]
            command += ["--count", str(count), "--prefix", store, *flags]
            command += ["--executor", "inline"] if verb == "run" else []
            found[name] = _seconds(command, checkout, scratch)
    return found


def _seconds(command: list[str], checkout: Path, where: Path) -> dict[str, float]:
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    with open(where / "output", "w+") as output:
        begun = time.perf_counter()
        process = subprocess.Popen(
            command, env=environment, cwd=where, stdout=output, stderr=subprocess.STDOUT
        )
        _, status, used = os.wait4(process.pid, 0)
        wall = time.perf_counter() - begun
        if status:
            output.seek(0)
            raise RuntimeError(f"{command}: exit status {status}: {output.read()[-2000:]}")
    return {"cpu_s": used.ru_utime + used.ru_stime, "wall_s": wall, "mib": used.ru_maxrss / 1024}


def exponent(points: list[tuple[int, float]]) -> float:
    """Slope of the least-squares line through (log n, log seconds)."""
    logs = [(math.log(n), math.log(seconds)) for n, seconds in points]
    x, y = (statistics.fmean(column) for column in zip(*logs, strict=True))
    return sum((a - x) * (b - y) for a, b in logs) / sum((a - x) ** 2 for a, _ in logs)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shards", type=int, nargs="+", default=[1_000, 4_000, 16_000])
    parser.add_argument("--checkout", type=Path, help="another checkout to measure beside this one")
    options = parser.parse_args()
    checkouts = {"this": ROOT}
    if options.checkout:
        checkouts["other"] = options.checkout.absolute()
    points: dict[tuple[str, str], list[tuple[int, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="growth-") as scratch:
        idle = {name: measure(path, 1, Path(scratch)) for name, path in checkouts.items()}
        for count in options.shards:
            for name, path in checkouts.items():
                for what, seconds in measure(path, count, Path(scratch)).items():
                    own = seconds["cpu_s"] - idle[name][what]["cpu_s"]
                    points.setdefault((name, what), []).append((count, own))
                    record: dict[str, Any] = {"checkout": name, "measure": what, "shards": count}
                    rounded = {key: round(value, 3) for key, value in seconds.items()}
                    print(json.dumps({**record, **rounded, "own_cpu_s": round(own, 3)}), flush=True)
    for (name, what), found in points.items():
        clear = [point for point in found if point[1] >= _NOISE_SECONDS]
        slope = round(exponent(clear), 2) if len(clear) > 1 else None
        print(json.dumps({"checkout": name, "measure": what, "exponent": slope}), flush=True)


if __name__ == "__main__":
    main()
