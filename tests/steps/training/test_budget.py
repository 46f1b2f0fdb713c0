"""How long to train: epochs and tokens as steps, against a walk through the batches."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import InputError
from steps.training.budget import resolved
from training.config import TrainConfig


def sequences(count: int, length: int = 16) -> Any:
    """What `resolved` reads of an artifact."""
    return cast(
        Any, SimpleNamespace(result={"sequences": count, "sequence_length": length, "seed": 7})
    )


@given(
    budget=st.integers(1, 300),
    first=st.integers(1, 20),
    later=st.lists(st.tuples(st.integers(1, 15), st.integers(1, 20)), max_size=3),
)
def test_steps_are_the_whole_batches_that_fit(budget, first, later):
    """Batch after batch is taken while the budget lasts, with the sizes of the schedule."""
    starts = list(itertools.accumulate(gap for gap, _ in later))
    schedule = tuple(zip(starts, (rows for _, rows in later), strict=True))
    train = TrainConfig(batch_size=first, batch_schedule=schedule)
    steps, left, rows = 0, budget, first
    while left >= (rows := dict(schedule).get(steps, rows)):
        left, steps = left - rows, steps + 1
    if not steps:
        with pytest.raises(InputError, match="less than one batch"):
            resolved(train, sequences(budget), epochs=1)
        return
    assert resolved(train, sequences(budget), epochs=1).steps == steps
    assert resolved(train, sequences(9), tokens=budget * 16 + 15).steps == steps


def test_a_shuffle_may_have_a_larger_seed_than_the_parameters():
    """Of which JAX's key has 32 bits."""
    shuffled = sequences(100)
    shuffled.result["seed"] = 2**40 + 5
    assert resolved(TrainConfig(batch_size=4), shuffled, epochs=1).seed == 5


def test_length_and_seed_are_those_of_the_sequences():
    """Unless the configuration names its own; another length is refused; `steps` is the budget."""
    found = resolved(TrainConfig(batch_size=2), sequences(9), epochs=2.5)
    assert (found.sequence_length, found.seed, found.steps) == (16, 7, 11)
    own = TrainConfig(batch_size=2, steps=3, seed=5, sequence_length=16)
    assert resolved(own, sequences(9), epochs=2.5) == own
    with pytest.raises(InputError, match="is 8, the shuffled sequences are 16"):
        resolved(TrainConfig(batch_size=2, sequence_length=8), sequences(9), epochs=1)
