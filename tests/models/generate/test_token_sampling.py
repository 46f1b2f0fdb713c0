"""What may be drawn and how often, against brute force in NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from models.generate.sampling_config import Sampling
from models.generate.token_sampling import Rules, choose, nucleus
from pipeline.errors import InputError

VOCAB = 12
nucleus_of = jax.jit(nucleus)
chosen = jax.jit(choose)

# Ties, both zeros, and numbers so far apart that most probabilities are 0.
logit = st.one_of(st.sampled_from([-0.0, 0.0, 1.0, 2.0, -80.0, 80.0]), st.floats(-30, 30, width=32))


def softmax(x: np.ndarray) -> np.ndarray:
    weights = np.exp(x - x.max())
    return weights / weights.sum()


def likeliest(logits: np.ndarray, k: int, p: float) -> np.ndarray:
    """Boolean [vocab]: the k largest, then of these the largest whose probabilities reach p."""
    logits = logits.astype(np.float64)
    kept = logits >= np.sort(logits)[-k]
    probabilities = softmax(np.where(kept, logits, -np.inf))
    for level in sorted(set(logits[kept]), reverse=True):
        nucleus = kept & (logits >= level)
        if p < 1 and probabilities[nucleus].sum() >= p:
            return nucleus
    return kept


@pytest.mark.slow
@given(
    rows=st.lists(st.lists(logit, min_size=VOCAB, max_size=VOCAB), min_size=2, max_size=2),
    k=st.integers(1, VOCAB + 3),
    p=st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
)
@example(rows=[[1.0] * VOCAB, [0.0] * VOCAB], k=3, p=0.5)
def test_the_nucleus_is_that_of_brute_force(rows, k, p):
    """Up to a share of 1e-5 of the probability, which float32 cannot tell."""
    logits = np.array(rows, np.float32)
    got = np.asarray(nucleus_of(logits, jnp.int32(k), jnp.float32(p)))
    for row, left in zip(logits, got, strict=True):
        kept = np.isfinite(left)
        np.testing.assert_array_equal(left[kept], row[kept])
        least = likeliest(row, min(k, VOCAB), max(p - 1e-5, 1e-9) if p < 1 else 1)
        most = likeliest(row, min(k, VOCAB), min(p + 1e-5, 1) if p < 1 else 1)
        assert (least <= kept).all()
        assert (kept <= most).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("temperature", "k", "p"),
    [(1.0, None, None), (0.6, None, None), (1.7, 5, None), (1.0, None, 0.8), (1.3, 7, 0.7)],
)
def test_tokens_are_drawn_as_often_as_they_are_likely(temperature, k, p):
    """40,000 draws of rows with one distribution: every count within five sigma."""
    logits = np.random.default_rng(1).normal(size=VOCAB).astype(np.float32) * 1.5
    scaled = logits.astype(np.float64) / temperature
    kept = likeliest(scaled, k or VOCAB, p or 1.0)
    want = softmax(np.where(kept, scaled, -np.inf))
    draws = 40_000
    rules = Rules.of(Sampling(temperature=temperature, top_k=k, top_p=p, seed=3))
    rows = np.broadcast_to(logits, (draws, VOCAB))
    got = chosen(rows, rules, rules.keys(draws), jnp.zeros(draws, jnp.int32))
    counts = np.bincount(np.asarray(got), minlength=VOCAB)
    assert (counts[~kept] == 0).all()
    sigma = np.sqrt(draws * want * (1 - want))
    assert (abs(counts - draws * want) <= 5 * sigma + 1e-9).all()


@pytest.mark.slow
def test_greedy_is_the_first_of_the_largest():
    """At temperature 0 whatever else is asked for."""
    logits = np.random.default_rng(2).normal(size=(7, VOCAB)).astype(np.float32)
    logits[0, [3, 8]] = 9.0
    rules = Rules.of(Sampling(top_k=2, top_p=0.1))
    got = chosen(logits, rules, rules.keys(7), jnp.zeros(7, jnp.int32))
    np.testing.assert_array_equal(got, logits.argmax(axis=1))


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        *({"temperature": t} for t in (1e-44, 1e-38, 1.2e-38, 3e-38, 1e-37, 1e-30, 1e-6)),
        *({"temperature": 1.0, "top_p": p} for p in (5e-324, 1e-45, 1e-40, 1.2e-38, 1e-12)),
        {"temperature": 2e-38, "top_k": 2, "top_p": 1e-40},
    ],
)
def test_the_smallest_settings_take_the_likeliest(settings):
    """Where a quotient overflows, a setting is none in float32, or all logits are far from 0."""
    logits = np.array([[12.0, 30.0, 25.0], [-900.0, -1e4, -899.0]], np.float32)
    rules = Rules.of(Sampling(**settings))
    for position in range(4):
        got = chosen(logits, rules, rules.keys(2), jnp.full(2, position, jnp.int32))
        np.testing.assert_array_equal(got, [1, 2])


@pytest.mark.slow
def test_a_draw_depends_on_seed_row_and_position_only():
    """Each of the three changes it, and another row's logits do not."""
    logits = np.zeros((50, 1000), np.float32)
    at = jnp.arange(50, dtype=jnp.int32)

    def draw(logits=logits, seed=0, positions=at):
        rules = Rules.of(Sampling(temperature=1.0, seed=seed))
        return np.asarray(chosen(logits, rules, rules.keys(len(logits)), positions))

    base = draw()
    assert len(set(base)) > 40
    assert (draw(seed=1) != base).sum() > 40
    assert (draw(positions=at + 1) != base).sum() > 40
    # Rows 20 on take on the logits of another row, and their own draws stay.
    other = logits.copy()
    other[:20, 7] = 50.0
    np.testing.assert_array_equal(draw(logits=other)[20:], base[20:])
    assert (draw(logits=other)[:20] == 7).all()
    np.testing.assert_array_equal(draw(logits=logits[:9], positions=at[:9]), base[:9])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": 0}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"seed": -1}, "seed"),
    ],
)
def test_impossible_settings_are_refused(fields, words):
    """One line that names the field."""
    with pytest.raises(InputError, match=words):
        Sampling(**fields)
