"""Random schedules and extensions of them against formulas in float64 that know no code of ours.

A trial draws a schedule whose fractions may add up to one, a length from 1 to millions of steps,
and steps to look at: the ends, the borders of warmup and decay, and random ones. It is extended one
to three times: no step that is done may get another rate, but by the longer end of "cosine" and
"linear".
"""

from __future__ import annotations

import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pipeline.errors import InputError
from tests.faults.registry import Fault, trials
from training.config import OptimizerConfig
from training.config.optimizer import SCHEDULES
from training.optimizer import schedule


def random_schedules(seed: int, count: int, workspace: Path) -> dict[str, Any]:
    """Rates compared, and schedules refused."""
    del workspace
    figures = Counter[str]()

    def trial(number: int) -> None:
        draw = random.Random(number)
        steps, config = int(10 ** draw.uniform(0, 7)), _config(draw)
        try:
            parts = config.phases(steps)
        except InputError:
            wanted = _exact(config.warmup, steps) + _decay(config, steps)
            assert wanted > steps, f"{config} fits into {steps} steps and is refused"
            figures["refused"] += 1
            return
        figures["rates"] += _compare(draw, config, steps, parts, steps)
        first = steps
        for _ in range(draw.randint(0, 3)):
            done, steps = steps, steps + int(10 ** draw.uniform(0, 6))
            done = draw.choice((done, draw.randint(1, done)))
            try:
                longer = config.continued(done, steps, first)
            except InputError:
                assert config.decay >= 1, f"{config} is refused from {done} to {steps} steps"
                figures["refused extensions"] += 1
                return
            parts = longer.phases(steps)
            warmup = round(_exact(config.warmup, first))
            assert parts[0] == warmup, f"the warmup of {warmup} steps moved to {parts[0]}"
            assert parts[1] <= steps - done, f"a decay of {parts[1]} begins before {done}"
            figures["rates"] += _compare(draw, longer, steps, parts, done)
            figures["extensions"] += 1

    trials(seed, count, trial)
    return dict(figures)


def _config(draw: random.Random) -> OptimizerConfig:
    warmup = draw.choice((0.0, draw.randint(0, 999) / 1000, float(draw.randint(1, 2000))))
    rest = round(1.0 - warmup, 3) if warmup < 1 else 0.5
    decay = draw.choice(
        (min(rest, 0.999), draw.randint(0, 999) / 1000, float(draw.randint(1, 999)))
    )
    return OptimizerConfig(
        schedule=draw.choice(SCHEDULES),
        learning_rate=10 ** draw.uniform(-6, 0),
        warmup=warmup,
        decay=decay,
        min_ratio=draw.choice((0.0, 0.1, 1.0, draw.random())),
        decay_shape=draw.choice(("linear", "sqrt")),
    )


def _exact(part: float, steps: int) -> float:
    return part * steps if part < 1 else part


def _decay(config: OptimizerConfig, steps: int) -> float:
    return _exact(config.decay, steps) if config.schedule == "wsd" else 0.0


def _compare(
    draw: random.Random, config: OptimizerConfig, steps: int, parts: tuple[int, int], border: int
) -> int:
    """Compare rates near borders and at random steps; returns their number."""
    near = (0, parts[0], steps - parts[1], border, steps - 1)
    chosen = {s + d for s in near for d in (-2, -1, 0, 1)}
    chosen |= {draw.randrange(steps) for _ in range(8)}
    asked = np.array(sorted(s for s in chosen if 0 <= s < steps), np.int32)
    found = np.asarray(jax.vmap(schedule(config, steps))(asked), np.float64)
    for s, rate in zip(asked.tolist(), found.tolist(), strict=True):
        want = _rate(config, steps, parts, s)
        # float32 counts steps exactly up to 2^24; the end of a fall is a small difference.
        assert math.isclose(rate, want, rel_tol=1e-4, abs_tol=2e-6 * config.learning_rate), (
            f"{config}: step {s} of {steps} has the rate {rate}, expected {want}"
        )
    return len(asked)


def _rate(config: OptimizerConfig, steps: int, parts: tuple[int, int], s: int) -> float:
    (warmup, tail), peak = parts, config.learning_rate
    if s < warmup:
        return peak * (s + 1) / warmup
    if config.schedule == "inverse_sqrt":
        return peak * max(config.min_ratio, math.sqrt(max(warmup, 1) / (s + 1)))
    if config.schedule in ("cosine", "linear"):
        tail = steps - warmup
    progress = max(0.0, (s + 1 - (steps - tail)) / tail) if tail else 0.0
    if config.schedule == "cosine":
        progress = (1 - math.cos(math.pi * progress)) / 2
    if config.schedule == "constant":
        progress = 0.0
    if config.schedule == "wsd" and config.decay_shape == "sqrt":
        progress = math.sqrt(progress)
    return peak * (1 - (1 - config.min_ratio) * progress)


SUITES = (
    Fault(
        title="random learning-rate schedules and extensions of them",
        ci=20,
        full=3000,
        run=random_schedules,
        slow=True,
    ),
)
