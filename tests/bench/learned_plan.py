"""The error of predicted step times on this machine, before and after learning from a store.

    python -m tests.bench.learned_plan STORE               train what is not there, print errors
    python -m tests.bench.learned_plan STORE --only 0:5    the first five of the trainings

The shapes are drawn with a fixed seed and are all different, and train for a time that follows from
the table, so that another table trains them again; the first are trained again with
another seed, for what two equal trainings differ by. Every training is profiled for three steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from steps.artifacts import Checkpoint
from steps.tokens.sequences import block_shuffle
from steps.training.plan.experience import STEP, Hardware, phase_of
from steps.training.train import train
from tests.steps.built import built
from tests.steps.synthetic import VOCAB, synthetic
from tests.training import tiny
from training.cost.learned import CPUS, correction, measurements, place_of
from training.cost.memory_plan import Devices
from training.cost.resolved_run import resolve_run
from training.cost.step_time import forecast

RUNS, AGAIN = 20, 6
SECONDS = 6.0  # of steps, by the table


def trainings(seed: int = 42) -> Iterator[Any]:
    """Trainings of `RUNS` different shapes, and the first `AGAIN` of them again."""
    draw = random.Random(seed)
    drawn = []
    for _ in range(RUNS):
        heads, size = draw.choice((2, 4, 8)), draw.choice((16, 32))
        model = dataclasses.replace(
            tiny.MODEL,
            vocab_size=VOCAB,
            layers=draw.choice((1, 2, 3, 4)),
            embed=draw.choice((64, 128, 192, 256)),
            heads=heads,
            kv_heads=draw.choice((1, heads)),
            head_size=size,
            mlp=draw.choice((128, 256, 512, 768)),
            vocab_multiple=draw.choice((64, 512, 2048, 8192)),
        )
        config = dataclasses.replace(
            tiny.TRAIN,
            sequence_length=draw.choice((32, 64, 128, 256)),
            batch_size=draw.choice((2, 4, 8, 16)),
            remat=draw.choice(("none", "full")),
            microbatches=draw.choice((1, 2)),
            profile=(8, 3),
        )
        optimizer = dataclasses.replace(tiny.OPTIMIZER, kind=draw.choice(("adamw", "muon")))
        phase = resolve_run(model, optimizer, config, Devices("cpu", 1)).largest
        seconds = forecast(phase, Hardware.of("cpu").device(1)).seconds
        steps = min(200, max(24, int(SECONDS / seconds)))
        every = {"steps": steps, "evaluate_every": steps, "checkpoint_every": steps}
        drawn.append((model, optimizer, dataclasses.replace(config, **every)))
    again = [(m, o, dataclasses.replace(t, seed=7)) for m, o, t in drawn[:AGAIN]]
    for model, optimizer, config in [*drawn, *again]:
        data = block_shuffle(
            synthetic(documents=4000),
            sequence_length=config.sequence_length,
            io_block_size=4,
            window_blocks=3,
        )
        yield train(data, model=model, optimizer=optimizer, train=config)


def report(runs: Sequence[Checkpoint]) -> None:
    """Print what was predicted and measured of each, and the errors."""
    steps = [run.result["measured"][STEP] for run in runs]
    phases = [phase_of(run) for run in runs]
    tables = [forecast(phase, Hardware.of("cpu").device(1)) for phase in phases]
    took = np.array([step["seconds"] for step in steps])
    said = {
        profiles: [
            measurements(t, p, s["seconds"], s.get("parts", {}) if profiles else {}, s["disturbed"])
            for t, p, s in zip(tables, phases, steps, strict=True)
        ]
        for profiles in (False, True)
    }

    def corrected(number: int, others: Sequence[int], profiles: bool) -> tuple[float, bool]:
        """(predicted seconds, whether the interval holds what was measured)."""
        table = tables[number]
        known = [each for other in others for each in said[profiles][other]]
        found = correction(table.shares, place_of(phases[number]), known, CPUS).applied(table)
        return found.seconds, found.range[0] <= took[number] <= found.range[1]

    every = range(len(runs))
    for name, before in (
        ("without the store", lambda _: ()),
        ("from the runs before it", range),
        ("from all other runs", lambda n: [other for other in every if other != n]),
    ):
        for profiles in (False, True):
            found = [corrected(number, before(number), profiles) for number in every]
            error = np.abs(np.array([seconds for seconds, _ in found]) / took - 1)
            inside = np.mean([held for _, held in found])
            with_them = "with profiles" if profiles else "steps alone"
            print(
                f"{name:24} {with_them:14} median {np.median(error):.0%}, "
                f"90th percentile {np.quantile(error, 0.9):.0%}, inside {inside:.0%}"
            )


if __name__ == "__main__":
    parsed = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parsed.add_argument("store")
    parsed.add_argument("--only", default=f"0:{RUNS + AGAIN}")
    given = parsed.parse_args()
    first, last = map(int, given.only.split(":"))
    done = []
    for number, node in list(enumerate(trainings()))[first:last]:
        done.append(built(given.store, node, Checkpoint))
        step = done[-1].result["measured"][STEP]
        middle = step["predicted"]["seconds"][1]
        print(
            f"{number:2} table {step['predicted']['table_seconds']:.4f} predicted {middle:.4f} "
            f"measured {step['seconds']:.4f} over {step['steps']} steps",
            flush=True,
        )
    report(done[:RUNS])
    seconds = [run.result["measured"][STEP]["seconds"] for run in done]
    pairs = [abs(np.log(a / b)) for a, b in zip(seconds, seconds[RUNS:], strict=False)]
    if pairs:
        print(f"two equal trainings differ by {np.median(pairs):.0%} (median of {len(pairs)})")
