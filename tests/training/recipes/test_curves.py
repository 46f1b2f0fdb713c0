"""The power law through published losses, beside NumPy's and SciPy's."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from training.recipes.curves import MARIN, NANOCHAT

CURVES = pytest.mark.parametrize("curve", [NANOCHAT, MARIN])


@CURVES
@pytest.mark.parametrize("flops", [1e17, 1e18, 3e18, 1e19, 1e21])
def test_forecast_and_interval_are_those_of_a_regression(curve, flops):
    """A least-squares line of logarithms, and the interval of a new observation around it."""
    x, y = np.log(np.array(curve.runs)).T
    line = scipy.stats.linregress(x, y)
    middle = line.intercept + line.slope * np.log(flops)
    scatter = np.sqrt(np.sum((y - line.intercept - line.slope * x) ** 2) / (len(x) - 2))
    far = (np.log(flops) - x.mean()) ** 2 / np.sum((x - x.mean()) ** 2)
    half = scipy.stats.t.ppf(0.9, len(x) - 2) * scatter * np.sqrt(1 + 1 / len(x) + far)
    expected = np.exp([middle - half, middle, middle + half])
    np.testing.assert_allclose(curve.loss(flops), expected, rtol=1e-9)


@CURVES
def test_its_own_runs_are_inside_and_others_extrapolated(curve):
    for flops, bits in curve.runs:
        low, _, high = curve.loss(flops)
        assert low < bits < high
        assert not curve.extrapolated(flops)
    assert curve.extrapolated(curve.runs[0][0] * 0.99)
    assert curve.extrapolated(curve.runs[-1][0] * 1.01)


@CURVES
@given(flops=st.floats(1e15, 1e24))
def test_flops_inverts_loss(curve, flops):
    """More FLOPs have less loss, and the loss gives them back."""
    low, bits, high = curve.loss(flops)
    assert low < bits < high
    assert curve.flops(bits) == pytest.approx(flops, rel=1e-6)
    assert curve.loss(2 * flops)[1] < bits


def test_a_larger_run_that_was_not_fitted_is_forecast():
    """Depth 24 of nanochat's LEADERBOARD.md, run 1: 0.74833 after 4.33e19 FLOPs."""
    low, bits, high = NANOCHAT.loss(4.330784e19)
    assert low < 0.74833 < high
    assert bits == pytest.approx(0.74833, rel=0.005)


def test_nats_are_those_that_marin_publishes():
    """130M of MuonH: 1.16609 bits a byte of c4_en are 3.78896 nats a token."""
    assert 1.1660879 * MARIN.nats == pytest.approx(3.7889595, rel=1e-3)
