"""The settings that a plan suggests where a step does not fit."""

import pytest

from steps.training.plan import memory
from steps.training.plan.declared_run import declared_run
from tests.steps.training.test_planning import BIG, facts, node
from training.config import TrainConfig


@pytest.mark.parametrize(
    ("sizes", "microbatches", "settings"),
    [
        ((8,), 8, []),
        ((8, 32), 8, []),
        ((32, 64), 16, ["microbatches 32", "batch_size 16, batch_schedule ((9, 32),)"]),
    ],
)
def test_suggested_settings_divide_every_batch_of_the_run(sizes, microbatches, settings):
    """Where each microbatch has one sequence there is none; here all that divide would fit."""
    schedule = tuple((9, size) for size in sizes[1:])
    training = TrainConfig(
        steps=50, batch_size=sizes[0], batch_schedule=schedule, microbatches=microbatches
    )
    run = declared_run(node(training=training, hardware="v6e-1"), {})
    assert [each.partition(": ")[0] for each in memory.nearest(run, share=1e9)] == settings
    refusal = facts(model=BIG, training=training, hardware="v6e-1").refusal
    assert "does not fit v6e-1 by formula" in refusal
