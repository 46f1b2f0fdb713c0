"""Corrections of predicted step times: laws, and the posterior against another way to it."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.shape.presets import llama_200m
from pipeline.accelerators import GPUS, TPUS
from training.config import OptimizerConfig, TrainConfig
from training.cost.learned import (
    CHIPS,
    CPUS,
    Measurement,
    correction,
    measurements,
    place_of,
    spread_of,
)
from training.cost.memory_plan import Devices
from training.cost.resolved_run import resolve_run
from training.cost.step_time import CPU, GUESSED, KINDS, cpu, forecast

HERE = (8.0, 6.0)


def shares_of(values):
    return {kind: value / sum(values) for kind, value in zip(KINDS, values, strict=True)}


shares = st.lists(st.floats(0.01, 1), min_size=len(KINDS), max_size=len(KINDS)).map(shares_of)
ratios = st.floats(0.2, 5.0)
spreads = st.sampled_from([CHIPS, CPUS])
disturbed = st.sampled_from([0.0, 0.3])
places = st.tuples(st.floats(5, 9), st.floats(5, 9))
runs = st.builds(Measurement, ratios, shares, places, disturbed)
parts = st.builds(
    lambda ratio, kind: Measurement(ratio, {kind: 1.0}), ratios, st.sampled_from(KINDS)
)
said = st.lists(st.one_of(runs, parts), max_size=6)


@given(shares, st.one_of(runs, parts), said, spreads)
def test_each_measurement_narrows_and_none_closes_the_interval(step, new, before, spread):
    first, second = (correction(step, HERE, each, spread) for each in (before, [*before, new]))
    assert second.narrowed <= first.narrowed * (1 + 1e-9)
    least = spread.noise / math.sqrt(
        spread.hardware**2 + spread.kind**2 + spread.program**2 + spread.noise**2
    )
    assert second.narrowed >= least * (1 - 1e-9)


@given(
    shares,
    st.lists(parts, max_size=4),
    st.lists(st.builds(Measurement, ratios, shares, st.just(HERE), disturbed), max_size=5),
    spreads,
)
def test_the_factor_is_the_posterior_of_a_linear_model(step, of_parts, steps, spread):
    """Of terms of the hardware, the kinds and the only program, by normal equations."""
    measured = [*of_parts, *steps]
    rows = [[1.0, *(m.shares.get(k, 0.0) for k in KINDS), float(bool(m.place))] for m in measured]
    prior = np.diag([spread.hardware**-2, *[spread.kind**-2] * len(KINDS), spread.program**-2])
    usual = np.array([spread.noise if m.place else spread.part for m in measured])
    noise = np.hypot(usual, [m.disturbed for m in measured])
    matrix = np.array(rows).reshape(-1, len(KINDS) + 2)
    precision = prior + (matrix / noise[:, None] ** 2).T @ matrix
    logs = np.log([m.ratio for m in measured])
    mean = np.linalg.solve(precision, (matrix / noise[:, None] ** 2).T @ logs)
    asked = np.array([1.0, *step.values(), 1.0])
    left, before = (
        asked @ np.linalg.solve(each, asked) + spread.noise**2 for each in (precision, prior)
    )
    found = correction(step, HERE, measured, spread)
    assert math.log(found.factor) == pytest.approx(asked @ mean, abs=1e-6)
    assert found.narrowed == pytest.approx(math.sqrt(left / before), rel=1e-6)


def resolved(batch, devices=8, chip="v6e"):
    limit = TPUS[chip].usable if chip else None
    where = Devices("tpu", devices, limit, 1, chip) if chip else Devices("cpu", devices)
    train = TrainConfig(steps=100, batch_size=batch, sequence_length=2048)
    return resolve_run(llama_200m, OptimizerConfig(), train, where).largest


def test_a_corrected_step_adds_up_and_profiles_move_their_kind():
    """Attention took half of what was predicted: the correction is nearly all attention's."""
    phase = resolved(64)
    step = forecast(phase, TPUS["v6e"])
    took = {"attention": 0.5 * step.times["attention"], "matmul": step.times["matmul"]}
    said = measurements(step, phase, step.seconds - took["attention"], took)
    found = correction(step.shares, place_of(phase), said, CHIPS)
    corrected = found.applied(step)
    assert corrected.seconds == pytest.approx(found.factor * step.seconds)
    assert corrected.mfu * corrected.seconds == pytest.approx(step.mfu * step.seconds)
    assert found.kinds["attention"] < 0.8 < found.kinds["matmul"]
    low, high = corrected.ratios
    assert step.ratios[0] < low < 1 < high < step.ratios[1]
    assert measurements(step, phase, 1.0, {"communication": 0.0})[1:] == []


def test_a_larger_program_learns_less_from_a_small_one():
    """The programs' own terms: the nearer their sizes, the more a run says."""
    step = shares_of([1.0] * len(KINDS))
    near, far = (
        correction(step, HERE, [Measurement(1.5, step, (8.0 + d, 6.0))] * 9, CHIPS)
        for d in (0.1, 4)
    )
    assert near.factor > far.factor > 1
    assert near.narrowed < far.narrowed


def synthetic(count, seed=0):
    """Runs of one machine: hidden factors of kinds, 5 % noise."""
    random = np.random.default_rng(seed)
    hidden = 1.3 * np.exp(0.15 * random.standard_normal(len(KINDS)))
    found = []
    for _ in range(count):
        phase = resolved(int(2 ** random.integers(3, 8)))
        step = forecast(phase, TPUS["v6e"])
        mixed = random.dirichlet(np.ones(len(KINDS)))
        step = dataclasses.replace(step, times=dict(zip(KINDS, step.seconds * mixed, strict=True)))
        took = float(np.dot(hidden, list(step.times.values())))
        found.append((step, phase, took * math.exp(0.05 * random.standard_normal())))
    return found


def test_a_store_of_twenty_runs_predicts_the_one_left_out():
    """Errors of leave-one-out fall below a third of the table's, within a narrower interval."""
    runs, table, errors, inside = synthetic(20), [], [], 0
    for left, (step, phase, took) in enumerate(runs):
        others = [m for n, run in enumerate(runs) if n != left for m in measurements(*run, {})]
        found = correction(step.shares, place_of(phase), others, CHIPS)
        corrected = found.applied(step)
        table.append(abs(math.log(step.seconds / took)))
        errors.append(abs(math.log(corrected.seconds / took)))
        inside += corrected.range[0] <= took <= corrected.range[1]
        assert found.narrowed < 0.6
    assert np.median(errors) < np.median(table) / 3
    assert inside >= 14


def test_a_cpu_has_a_wide_guess_and_shares_its_cores():
    """Two devices of a machine take as long as one for the same work, but for what they send."""
    assert (spread_of(CPU), spread_of("v6e")) == (CPUS, CHIPS)
    one, two = (forecast(resolved(8, n, ""), cpu(n, 4)) for n in (1, 2))
    assert one.ratios == two.ratios == GUESSED
    assert two.times["matmul"] == pytest.approx(one.times["matmul"], rel=0.02)
    assert GPUS["h100"].peak > cpu(1, 4).peak
