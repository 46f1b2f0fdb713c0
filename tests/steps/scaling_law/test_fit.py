"""Laws recovered from points that were made from a law, and compared with other ways to fit."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, special, stats

from pipeline import InputError
from steps.scaling_law.fit import HUBER, ScalingLaw, fit_power, fit_two_variables
from steps.scaling_law.points import Point, frontier, why_not_two_variables

CHINCHILLA = {"E": 1.69, "A": 406.4, "alpha": 0.34, "B": 410.7, "beta": 0.28}
"""Hoffmann et al., 2022, equation 10."""
SIZES = (5e6, 2e7, 8e7, 3.2e8)
BUDGETS = (1e17, 6e17, 4e18)
N, D = (np.array(c) for c in zip(*((n, c / 6 / n) for n in SIZES for c in BUDGETS), strict=True))


def made(law=CHINCHILLA, noise=0.0, seed=0):
    """Losses of the runs."""
    exact = law["E"] + law["A"] / N ** law["alpha"] + law["B"] / D ** law["beta"]
    return exact * np.exp(noise * np.random.default_rng(seed).standard_normal(len(N)))


def points(losses, sizes=N, tokens=D):
    """Runs of 6 N FLOPs a token."""
    return [
        Point(name="run", parameters=int(n), tokens=int(d), flops=6.0 * int(n) * int(d), loss=loss)
        for n, d, loss in zip(sizes, tokens, losses, strict=True)
    ]


@settings(max_examples=5, deadline=None)
@given(
    irreducible=st.floats(0.5, 2.5),
    alpha=st.floats(0.2, 0.9),
    beta=st.floats(0.2, 0.9),
    shares=st.tuples(st.floats(0.3, 2.0), st.floats(0.3, 2.0)),
)
def test_exact_losses_give_the_law_they_were_made_from(irreducible, alpha, beta, shares):
    """To four digits, whatever the coefficients; `shares` are the terms amid the runs."""
    a, b = shares[0] * 4e7**alpha, shares[1] * 2e9**beta
    law = {"E": irreducible, "A": a, "alpha": alpha, "B": b, "beta": beta}
    fit, reason = fit_two_variables(N, D, made(law), resamples=2)
    assert reason == ""
    assert {k: float(v) for k, v in vars(fit.law).items()} == pytest.approx(law, rel=1e-4)
    assert fit.noise < 1e-6


def huber(theta, losses):
    """The objective of Hoffmann et al., with their coefficients: a, b, e, alpha, beta."""
    a, b, e, alpha, beta = theta
    terms = [a - alpha * np.log(N), b - beta * np.log(D), np.full_like(N, e)]
    return special.huber(HUBER, special.logsumexp(terms, axis=0) - np.log(losses)).sum()


@pytest.mark.slow
def test_no_start_of_another_optimiser_ends_lower():
    """The published objective by L-BFGS and by Nelder and Mead's simplex, from a grid of starts."""
    losses = made(noise=0.0005, seed=3)
    fit, _ = fit_two_variables(N, D, losses, resamples=2)
    law = fit.law
    ours = huber([np.log(law.A), np.log(law.B), np.log(law.E), law.alpha, law.beta], losses)
    starts = itertools.product((5, 8), (5, 8), (0.4,), (0.4,), (0.3,))
    ends = [
        optimize.minimize(huber, start, (losses,), method="L-BFGS-B", options={"maxfun": 3000})
        for start in starts
    ]
    lowest = min(ends, key=lambda end: end.fun)
    lowest = optimize.minimize(huber, lowest.x, (losses,), method="Nelder-Mead", tol=1e-12)
    assert ours <= lowest.fun * (1 + 1e-6)


@pytest.mark.slow
def test_intervals_hold_the_truth_and_are_not_wide():
    """Of the loss at ten times the largest budget, in ladders whose runs have noise of 0.2 %."""
    flops = 10 * max(BUDGETS)
    truth = EXACT.buy(flops).loss.value
    found = [
        ScalingLaw(points(made(noise=0.002, seed=seed)), resamples=20).buy(flops).loss
        for seed in range(4)
    ]
    assert sum(each.low < truth < each.high for each in found) >= 3
    assert all(0.005 < each.high - each.low < 0.1 for each in found)


def test_the_same_losses_give_the_same_numbers():
    """Also those of the refits."""
    first, second = (
        fit_two_variables(N, D, made(noise=0.01), resamples=3)[0].refits for _ in range(2)
    )
    assert vars(first).keys() == vars(second).keys()
    assert all(np.array_equal(vars(first)[name], vars(second)[name]) for name in vars(first))


@given(flops=st.floats(1e16, 1e21))
@settings(max_examples=20, deadline=None)
def test_a_budget_buys_the_size_of_the_closed_form(flops):
    """Hoffmann et al., equation 4: N = G (C / 6)^(beta / (alpha + beta)) at 6 N FLOPs a token."""
    c = CHINCHILLA
    total = c["alpha"] + c["beta"]
    scale = (c["alpha"] * c["A"] / (c["beta"] * c["B"])) ** (1 / total)
    size = scale * (flops / 6) ** (c["beta"] / total)
    bought = EXACT.buy(flops)
    assert bought.parameters == pytest.approx(size, rel=0.02)
    assert bought.tokens == pytest.approx(flops / 6 / bought.parameters)
    loss = c["E"] + c["A"] / size ** c["alpha"] + c["B"] / (flops / 6 / size) ** c["beta"]
    assert bought.loss.value == pytest.approx(loss, rel=1e-4)


EXACT = ScalingLaw(points(made()), resamples=1)


def test_a_power_law_has_the_slope_and_the_interval_of_linear_regression():
    """Student's t interval of the slope, which the drawn scale of the noise has to give."""
    flops = np.array([1e17, 3e17, 1e18, 4e18, 1e19])
    losses = 20 * flops**-0.04 * np.exp([0.01, -0.02, 0.015, 0.0, -0.005])
    fit = fit_power(flops, losses, resamples=20_000)
    line = stats.linregress(np.log(flops), np.log(losses))
    assert float(fit.law.gamma) == pytest.approx(-line.slope)
    assert float(fit.law.K) == pytest.approx(np.exp(line.intercept))
    reach = stats.t.ppf(0.95, 3) * line.stderr
    low, high = np.quantile(fit.refits.gamma, [0.05, 0.95])
    assert (low, high) == pytest.approx((-line.slope - reach, -line.slope + reach), rel=0.05)


@pytest.mark.parametrize(
    ("sizes", "tokens", "words"),
    [
        (N[:5], D[:5], "5 runs, L"),
        (np.repeat([1e7, 2e7], 3), np.geomspace(1e8, 1e9, 6), "2 model sizes"),
        (np.geomspace(1e7, 1e9, 6), np.tile([1e8, 1e9], 3), "2 token counts"),
        (np.geomspace(1e7, 1e9, 6), 20 * np.geomspace(1e7, 1e9, 6), "on one line"),
        (np.geomspace(1e7, 1e9, 6), 1e18 / np.geomspace(1e7, 1e9, 6), "on one line"),
    ],
)
def test_runs_that_cannot_determine_two_variables_say_why(sizes, tokens, words):
    """Too few, of too few sizes or token counts, and both changed together."""
    assert words in why_not_two_variables(points(np.ones(len(sizes)), sizes, tokens))


def test_a_fixed_ratio_gives_a_power_law_in_compute_through_all_runs():
    """And the size that a budget buys is on the runs' line."""
    sizes = np.geomspace(1e7, 8e7, 4)
    law = ScalingLaw(points(30 * (120 * sizes**2) ** -0.05, sizes, 20 * sizes), resamples=20)
    assert "6" in law.why_compute
    assert float(law.fit.law.gamma) == pytest.approx(0.05)
    bought = law.buy(120 * 1e9**2)
    assert bought.parameters == pytest.approx(1e9, rel=1e-3)
    assert bought.between is None
    assert bought.loss.value == pytest.approx(30 * (120 * 1e18) ** -0.05)


def test_losses_that_do_not_fall_with_size_are_a_power_law_in_compute():
    """L(N, D) of them would be anything; the best run of each budget is what is fitted."""
    losses = 1.5 + 300 / D**0.3
    law = ScalingLaw(points(losses), resamples=20)
    assert "do not fall with a power of N" in law.why_compute
    assert [point.parameters for point in law.points] == [SIZES[0]] * len(BUDGETS)


def test_too_few_budgets_for_any_law_are_refused_in_one_line():
    """The frontier has a point for each budget that lowers the loss."""
    worse = [dataclasses.replace(p, loss=p.flops) for p in points(made())]
    for runs in (points(made())[1:6:3], worse):
        with pytest.raises(
            InputError, match=r"runs of 3 budgets that lower the loss, found \d"
        ) as e:
            frontier(runs)
        assert "\n" not in str(e.value)
