"""Which published curve a training is compared with."""

from __future__ import annotations

from dataclasses import replace

import pytest

from steps.scaling_law.published_curves import published
from training.recipes import llama, marin_qwen3, nanochat, speedrun
from training.recipes.curves import MARIN, NANOCHAT


def found(recipe, **changes):
    parts = {"model": recipe.model, "optimizer": recipe.optimizer, "train": recipe.train} | changes
    return published(parts["model"], parts["optimizer"], parts["train"])


@pytest.mark.parametrize("depth", [4, 12, 20])
def test_nanochat_of_any_depth_has_its_curve(depth):
    recipe = nanochat(depth)
    assert found(recipe) == (NANOCHAT, pytest.approx(recipe.flops))


@pytest.mark.parametrize("at", range(4))
def test_the_runs_of_a_curve_come_to_what_they_came_to(at):
    """Marin's own counts of FLOPs within 15 %, and so its losses within 2 %."""
    flops, bits = MARIN.runs[at]
    curve, ours = found(marin_qwen3(("130m", "300m", "520m", "1.2b")[at]))
    assert curve is MARIN
    assert ours == pytest.approx(flops, rel=0.15)
    assert curve.loss(ours)[1] == pytest.approx(bits, rel=0.02)


def test_rates_do_not_matter_and_all_else_does():
    """Another rate is the same recipe; another optimizer, net of nanochat or momentum is none."""
    nano, marin = nanochat(12), marin_qwen3("300m")
    slow = replace(marin.optimizer, learning_rate=1e-3, muon_learning_rate=2e-3, weight_decay=0.2)
    assert found(llama("200m"), optimizer=slow)[0] is MARIN
    assert found(marin, optimizer=replace(slow, muon_momentum=0.9)) is None
    assert found(nano, model=replace(nano.model, value_embeddings="none")) is None
    assert found(llama("200m")) is found(speedrun()) is None
