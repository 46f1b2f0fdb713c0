"""kill -9 the demo at random moments and run it again: does it end as if nothing had happened?

    python -m tests.faults.kill_demo --trials 10 --steps 60 --seed 0

Each trial starts from an empty store, is killed (its process group at once; Ray's own processes
notice and end) at a moment drawn from the undisturbed run, and is run again. One JSON line per
trial: what was finished when it died, whether finished steps were redone, and whether the token
cache and the final parameters are bit-equal to the undisturbed run's.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.store import storage
from pipeline.store.manifest import Manifest, load
from steps.artifacts import Checkpoint

ROOT = Path(__file__).parents[2]


def command(store: str, flags: list[str]) -> list[str]:
    """The demo's command line on a store."""
    demo = ["experiments/run_200m.py", "--preset", "smoke", "--prefix", store]
    return [sys.executable, *demo, *flags]


def published(store: str) -> dict[str, Manifest]:
    """Finished steps by display name."""
    found = {}
    for name in storage.list_names(store):
        manifest = load(storage.join(store, name))
        if manifest is not None:
            found[manifest.label] = manifest
    return found


def path_of(store: str, manifest: Manifest) -> str:
    """Directory of a published step."""
    (name,) = [n for n in storage.list_names(store) if manifest.key.startswith(n[-20:])]
    return storage.join(store, name)


def parameters(store: str) -> list[np.ndarray]:
    """Every array of the final checkpoint's model."""
    import jax

    from models.shape.config import TransformerConfig
    from training.checkpoint.restore import load_model

    manifest = published(store)["train"]
    checkpoint = Checkpoint(path_of(store, manifest), manifest)
    model = load_model(checkpoint.final, TransformerConfig(**checkpoint.result["model"]))
    return [np.asarray(leaf) for leaf in jax.tree.leaves(model)]


def token_digests(store: str) -> dict[str, str]:
    """Content digest of every shard of the token cache."""
    shards = published(store)["tokenize"].shards
    return {s.name: s.result["content"] for s in shards if "content" in s.result}


def trial(moment: float, flags: list[str], reference: dict[str, Any]) -> dict[str, Any]:
    """One kill and one run to the end."""
    store = tempfile.mkdtemp(prefix="ponente-kill-")
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    victim = subprocess.Popen(command(store, flags), cwd=ROOT, start_new_session=True, **quiet)
    time.sleep(moment)
    os.killpg(victim.pid, signal.SIGKILL)
    victim.wait()
    before = published(store)
    clock = time.monotonic()
    again = subprocess.run(command(store, flags), cwd=ROOT, capture_output=True, text=True)
    after = published(store)
    pairs = zip(parameters(store), reference["parameters"], strict=True)
    return {
        "killed_after_s": round(moment, 1),
        "finished_before": sorted(before),
        "exit": again.returncode,
        "second_run_s": round(time.monotonic() - clock, 1),
        "redone": [name for name in before if after[name].attempt != before[name].attempt],
        "tokens_equal": token_digests(store) == reference["tokens"],
        "parameters_equal": all(np.array_equal(a, b) for a, b in pairs),
    }


def main() -> None:
    """Run the trials; exits 1 when one of them differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    flags = ["--training.steps", str(options.steps), "--training.checkpoint-every", "10"]
    store = tempfile.mkdtemp(prefix="ponente-reference-")
    clock = time.monotonic()
    subprocess.run(command(store, flags), cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    length = time.monotonic() - clock
    reference = {"parameters": parameters(store), "tokens": token_digests(store)}
    print(json.dumps({"seed": options.seed, "undisturbed_s": round(length, 1)}), flush=True)
    draw = random.Random(options.seed)
    good = True
    for _ in range(options.trials):
        row = trial(draw.uniform(0, length), flags, reference)
        row_good = not row["exit"] and not row["redone"]
        good = good and row_good and row["tokens_equal"] and row["parameters_equal"]
        print(json.dumps(row), flush=True)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
