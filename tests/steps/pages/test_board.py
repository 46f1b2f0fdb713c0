"""The board: a ranking by losses over settings and seeds, and what of it is noise."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from experiments import recipes
from experiments.board import entries, scaled
from pipeline import InputError
from pipeline.store.storage import read_bytes
from steps.pages.board import ranked, spearman
from training.config import Group, OptimizerConfig

LOSSES = st.lists(st.floats(2.0, 5.0), min_size=2, max_size=5)


@given(LOSSES, LOSSES)
def test_a_difference_is_that_of_welch(own, first):
    """Against SciPy's test; the first entry is the one compared with."""
    losses = {(name, "s"): dict(enumerate(by)) for name, by in (("a", first), ("b", own))}
    rows = {row.entry: row for row in ranked(losses, "a")}
    assert (rows["a"].mean, rows["a"].difference.half) == (0.0, 0.0)
    assert rows["b"].losses == {"s": pytest.approx(np.mean(own))}
    assert rows["b"].mean == pytest.approx(np.mean(own) - np.mean(first))
    assume(min(np.std(own), np.std(first)) > 1e-3)  # SciPy refuses nearly equal numbers
    found = stats.ttest_ind(own, first, equal_var=False).confidence_interval(0.95)
    assert rows["b"].difference.half == pytest.approx((found.high - found.low) / 2)


def test_settings_count_alike_and_their_noise_adds_up():
    """Two settings of other spreads, drawn often: 95 % of the intervals hold the truth."""
    draw, held = np.random.default_rng(0), 0
    for _ in range(1000):
        cells = {
            (entry, f"{spread}"): dict(enumerate(draw.normal(loss, spread, 3)))
            for spread in (0.1, 0.3)
            for entry, loss in (("a", 4.0), ("b", 3.0))
        }
        (found, _) = ranked(cells, "a")
        means = [
            np.mean([*cells["b", s].values()]) - np.mean([*cells["a", s].values()])
            for s in ("0.1", "0.3")
        ]
        assert found.mean == pytest.approx(np.mean(means))
        held += abs(found.mean + 1.0) < found.difference.half
    assert 930 < held < 985


def test_one_seed_gives_no_interval():
    """A ranking without a spread calls nothing noise, and nothing is."""
    table = ranked({("a", "s"): {0: 3.0}, ("b", "s"): {0: 2.5}}, "a")
    assert [row.entry for row in table] == ["b", "a"]
    assert not table[0].difference.within_noise
    assert "standard_error" not in table[0].difference.to_json()


def test_ranks_are_compared_where_both_have_the_entry():
    one, other = {"a": 1.0, "b": 2.0, "c": 2.5, "d": 0.0}, {"a": 30.0, "b": 10.0, "c": 5.0}
    assert spearman(one, other) == pytest.approx(-1.0)
    assert spearman(one, {"a": 1.0, "b": 2.0}) is None


def test_a_factor_scales_every_rate():
    config = OptimizerConfig(
        kind="muon", learning_rate=0.1, head=Group(learning_rate=0.01), muon_learning_rate=0.02
    )
    found = scaled(config, 0.5)
    assert (found.learning_rate, found.muon_learning_rate) == (0.05, 0.01)
    assert found.head == Group(learning_rate=0.005)
    assert found.embedding == config.embedding


def test_sizes_and_entries_are_what_they_are_called():
    """Equal parameters in the blocks' matrices, whatever an entry changes of the model."""
    for name, entry in entries().items():
        for size, number in (("0.25M", 0.25e6), ("0.5M", 0.5e6), ("1M", 1e6), ("4M", 4e6)):
            model = recipes.shape(recipes.SIZES[size], entry)
            matrices = model.layers * model.embed * (4 * model.embed + 3 * recipes.SIZES[size].mlp)
            gates = model.value_parameters[1]
            assert model.matmul_parameters - gates == matrices + model.vocab_size * model.embed
            assert 1.0 <= matrices / number < 1.15, name


def test_a_board_needs_the_entry_that_it_compares_with():
    with pytest.raises(InputError, match="'lion', with which entries are compared, has no run"):
        recipes.recipes(names=("adamw", "muon"), first="lion")


@pytest.mark.parametrize("asked", [{"names": ("adamw", "muon_groups")}, {"sizes": ("2M",)}])
def test_an_unknown_entry_or_size_is_refused(asked):
    ((kind, found),) = asked.items()
    with pytest.raises(InputError, match=f"recipes.{kind}: expected some of .* found {found[-1]}"):
        recipes.recipes(**asked)


@pytest.mark.slow
def test_the_smoke_preset_ranks_two_entries(tmp_path):
    page = recipes.experiment.run("smoke", prefix=str(tmp_path), executor="inline")
    text = read_bytes(page.page).decode()
    assert "2 recipes by validation loss" in text
    assert {row["entry"] for row in page.result["ranking"]} == {"adamw", "muon-groups"}
    assert page.result["rank_correlation"] is None
