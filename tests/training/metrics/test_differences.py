"""Standard errors of differences of losses against scipy's t-tests and sums written out."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from training.metrics.differences import MOST_BLOCKS, RunLoss, SequenceLosses, differences
from training.metrics.trackers import scalars


def measured(name, nll, tokens, recipe="", of="text"):
    """A run with these losses by sequence, as its record has them."""
    row = json.loads(json.dumps(SequenceLosses.row(of, np.float32(nll), np.int32(tokens))))
    losses = SequenceLosses.of_row(row)
    return RunLoss(name, losses.sums[0].sum() / losses.sums[1].sum(), recipe, losses)


def drawn(seed, sequences, shift=0.0, spread=5.0, tokens=100):
    """Two models' nll: text differs far more than the models do."""
    random = np.random.default_rng(seed)
    text = random.normal(300, 60, sequences)
    return text, text + random.normal(shift * tokens, spread, sequences)


SEEDS = st.integers(0, 2**32 - 1)


@given(SEEDS, st.integers(2, 60), st.floats(-0.1, 0.1))
def test_over_sequences_of_one_length_it_is_the_paired_t_test(seed, sequences, shift):
    """The statistic and the decision of scipy's test of related samples."""
    a, b = drawn(seed, sequences, shift)
    (found,) = differences(
        [measured("a", a, np.full(sequences, 100)), measured("b", b, np.full(sequences, 100))], 0
    )
    want = stats.ttest_rel(np.float32(b).astype(float), np.float32(a).astype(float))
    assert found.value / found.error == pytest.approx(want.statistic, rel=1e-4)
    assert found.within_noise == (want.pvalue > 0.05)
    assert found.how == f"paired over {sequences} sequences"
    assert (found.runs, found.than) == (("b",), ("a",))


@given(SEEDS, st.integers(2, 60))
def test_sequences_of_other_lengths_have_the_weight_of_their_tokens(seed, sequences):
    """The variance of a ratio of sums, term by term in Python's floats."""
    random = np.random.default_rng(seed)
    tokens = random.integers(1, 200, sequences)
    a, b = (np.float32(tokens * random.normal(3, 0.5, sequences)) for _ in range(2))
    (found,) = differences([measured("a", a, tokens), measured("b", b, tokens)], 0)
    total = math.fsum(tokens)
    ratio = math.fsum(float(y) - float(x) for x, y in zip(a, b, strict=True)) / total
    rest = [float(y) - float(x) - ratio * t for x, y, t in zip(a, b, tokens.tolist(), strict=True)]
    variance = sequences / (sequences - 1) * math.fsum(r * r for r in rest) / total**2
    assert found.value == pytest.approx(ratio, rel=1e-5, abs=1e-6)
    assert found.error == pytest.approx(math.sqrt(variance), rel=1e-6)


@given(SEEDS, st.integers(2, 5), st.integers(1, 5))
def test_over_seeds_it_is_welchs_t_test(seed, first, second):
    """A recipe of one seed has no spread, and so no error over seeds."""
    random = np.random.default_rng(seed)
    losses = random.normal(3, 0.01, first), random.normal(3.02, 0.03, second)
    runs = [
        RunLoss(f"{r}{n}", x, r)
        for r, part in zip("ab", losses, strict=True)
        for n, x in enumerate(part)
    ]
    *over_seeds, unpaired = differences(runs, 0)
    assert len(over_seeds) == (second > 1)
    for found in over_seeds:
        want = stats.ttest_ind(losses[1], losses[0], equal_var=False)
        assert found.value == pytest.approx(losses[1].mean() - losses[0].mean())
        assert found.value / found.error == pytest.approx(want.statistic)
        assert found.freedom == pytest.approx(want.df)
        assert found.within_noise == (want.pvalue > 0.05)
        assert found.how == f"over {second} and {first} seeds"
    assert unpaired.how == "not paired: b0 has no losses by sequence"
    assert not unpaired.within_noise
    assert math.isnan(unpaired.error)


def test_of_equal_models_one_difference_in_twenty_is_not_noise():
    """400 pairs of which no model is better, and 400 whose difference is four standard errors."""
    for shift, least, most in ((0.0, 0.92, 0.98), (0.02, 0.0, 0.06)):
        within = 0
        for seed in range(400):
            a, b = drawn(seed, 100, shift)
            runs = [measured(n, x, np.full(100, 100)) for n, x in (("a", a), ("b", b))]
            within += next(differences(runs, 0)).within_noise
        assert least <= within / 400 <= most


def test_seeds_are_averaged_before_they_are_paired():
    """Two recipes of two seeds: the mean of each by sequence; the lowest mean is the reference."""
    nll = [drawn(seed, 50)[1] for seed in (1, 1, 2, 3)]
    nll[1] = nll[1] - 100
    tokens = np.full(50, 100)
    runs = [measured(str(n), x, tokens, "ab"[n % 2]) for n, x in enumerate(nll)]
    seeds, paired = differences(runs)
    means = [(nll[n] + nll[n + 2]) / 2 for n in (0, 1)]
    best = int(means[1].sum() < means[0].sum())
    pairs = (means[1 - best] - means[best]) / 100
    assert paired.than == (("0", "2"), ("1", "3"))[best]
    assert paired.error == pytest.approx(pairs.std(ddof=1) / math.sqrt(50), rel=1e-4)
    assert seeds.value == paired.value == pytest.approx(pairs.mean(), rel=1e-4)


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"of": "other"}, "not paired: scored on other sequences"),
        ({"tokens": [3, 5]}, "not paired: scored on other sequences"),
        ({"nll": [1.0], "tokens": [4]}, "not paired: scored on other sequences"),
    ],
)
def test_other_sequences_are_not_paired(other, why):
    """Another split or length has another digest; another loss mask other counts."""
    given = {"nll": [9.0, 8.0], "tokens": [4, 4]}
    (found,) = differences([measured("a", **given), measured("b", **{**given, **other})], 0)
    assert (found.how, found.within_noise) == (why, False)
    assert "standard_error" not in found.to_json()


def test_one_sequence_has_no_error_and_nan_is_no_noise():
    """Nor is a loss that is not finite the lowest."""
    one = [measured(n, [x], [4]) for n, x in (("a", 3.0), ("b", 4.0))]
    assert next(differences(one)).how == "not paired: one sequence"
    nan = [measured(n, x, [4, 4]) for n, x in (("a", [math.nan, 1.0]), ("b", [4.0, 4.0]))]
    (found,) = differences(nan)
    assert found.than == ("b",)
    assert not found.within_noise


@given(st.integers(1, 3 * MOST_BLOCKS + 5))
def test_a_row_is_small_and_has_every_token_once(sequences):
    """Blocks of consecutive sequences; trackers see no number to draw."""
    tokens = np.arange(sequences, dtype=np.int32) % 7
    row = SequenceLosses.row("x", tokens.astype(np.float32) * 2, tokens)
    losses = SequenceLosses.of_row(row, scale=0.5)
    size = -(-sequences // MOST_BLOCKS)
    want = [tokens[at : at + size].sum() for at in range(0, sequences, size)]
    assert losses.sums[0].tolist() == losses.sums[1].tolist() == want
    assert losses.sequences == sequences
    assert len(json.dumps(row)) < 11 * MOST_BLOCKS + 200
    assert scalars({"kind": "sequences", "time": 0, "step": 1, "split": "a", **row}) == {}
