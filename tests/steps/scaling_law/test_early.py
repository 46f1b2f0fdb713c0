"""Intervals of a training loss early, from the runs behind a forecast."""

from __future__ import annotations

import dataclasses
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import logsumexp

from steps.scaling_law.early import NOISE, bounds, ratios
from steps.scaling_law.points import Point
from training.config import TrainConfig


def point(parameters, tokens):
    return Point(name="", parameters=parameters, tokens=tokens, flops=1.0)


def oracle(forecast, wanted, runs, share, draws=200_000):
    """Quantiles of the predictive loss, by weights of samples of slopes and noise."""
    random = np.random.default_rng(0)
    noise = np.sqrt(3 * NOISE[share] ** 2 / random.chisquare(3, draws))
    # The slopes' deviation is 0.05 where the noise is its prior value, and in proportion elsewhere.
    slopes = random.standard_normal((draws, 2)) * 0.05 * (noise / NOISE[share])[:, None]
    offsets = np.array(
        [
            [math.log(p.parameters / wanted.parameters), math.log(p.tokens / wanted.tokens)]
            for p in runs
        ]
    )
    rest = np.array([r[share] for r in runs.values()]) - slopes @ offsets.T
    count, mean = len(runs), rest.mean(axis=1)
    squares = ((rest - mean[:, None]) ** 2).sum(axis=1)
    log = -squares / (2 * noise**2) - (count - 1) * np.log(noise)
    weights = np.exp(log - logsumexp(log))
    values = mean + noise * math.sqrt(1 + 1 / count) * random.standard_normal(draws)
    order = np.argsort(values)
    low, high = values[order][np.searchsorted(np.cumsum(weights[order]), [0.1, 0.9])]
    ends = np.log(forecast)
    half = math.hypot((ends[1] - ends[0]) / 2, (high - low) / 2)
    middle = ends.mean() + (low + high) / 2
    return math.exp(middle - half), math.exp(middle + half)


@pytest.mark.parametrize("count", [2, 4, 9])
def test_the_intervals_are_those_of_the_priors(count):
    """Against weighted samples, for few runs and many."""
    random = np.random.default_rng(count)
    sizes = [(n, d) for n in (1e5, 2e5, 4e5) for d in (1e6, 2e6, 4e6)][:count]
    runs = {
        point(int(n), int(d)): {s: 0.3 - 0.2 * s + 0.02 * random.standard_normal() for s in NOISE}
        for n, d in sizes
    }
    wanted, forecast = point(400_000, 8_000_000), (3.0, 3.2)
    found = bounds(forecast, wanted, 1000, list(runs.items()))
    assert [step for step, *_ in found] == [100, 250, 500]
    for (_, low, high), share in zip(found, NOISE, strict=True):
        want = oracle(forecast, wanted, runs, share)
        assert (low, high) == pytest.approx(want, abs=0.03 * (want[1] - want[0]))


@given(st.floats(-0.5, 0.5), st.floats(0.1, 10.0))
def test_the_losses_scale_with_the_forecast_and_the_ratio(shift, scale):
    """A ratio that all runs share, and a unit of the loss, move the intervals alone."""
    runs = [(point(10**5, d), dict.fromkeys(NOISE, 0.2)) for d in (10**6, 2 * 10**6)]
    moved = [(each, {s: r + shift for s, r in ratios.items()}) for each, ratios in runs]
    wanted = point(10**5, 4 * 10**6)
    before = bounds((3.0, 3.1), wanted, 100, runs)
    after = bounds((3.0 * scale, 3.1 * scale), wanted, 100, moved)
    factor = scale * math.exp(shift)
    for (_, *old), (_, *new) in zip(before, after, strict=True):
        assert new == pytest.approx([factor * each for each in old])
    assert all(low < 3.05 * math.exp(0.2) < high for _, low, high in before)


def test_one_run_gives_intervals_and_a_damaged_record_none(tmp_path):
    """A line that is no JSON, a row without a loss, no record at all."""
    run = (point(10**5, 10**6), dict.fromkeys(NOISE, 0.2))
    assert len(bounds((3.0, 3.1), point(10**5, 4 * 10**6), 100, [run])) == 3
    sound = json.dumps({"kind": "step", "step": 1, "loss": 3.0})
    for lines in ([sound, '{"kind": "step", nonsense'], ['{"kind": "step", "step": 1}'], []):
        (tmp_path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
        made = SimpleNamespace(
            train=TrainConfig(steps=10, batch_size=1),
            result={"last": {"loss": 2.0}},
            shard=lambda name: str(tmp_path),
        )
        assert ratios(made) is None


def test_a_wider_forecast_and_runs_further_away_widen_the_intervals():
    near = [(point(10**5, d), dict.fromkeys(NOISE, 0.2)) for d in (10**6, 2 * 10**6)]
    far = [(dataclasses.replace(p, parameters=10**3), r) for p, r in near]
    wanted = point(10**5, 4 * 10**6)

    def widths(forecast, runs):
        return [high / low for _, low, high in bounds(forecast, wanted, 100, runs)]

    base = widths((3.0, 3.1), near)
    for wider in (widths((2.9, 3.2), near), widths((3.0, 3.1), far)):
        assert all(a > b for a, b in zip(wider, base, strict=True))
