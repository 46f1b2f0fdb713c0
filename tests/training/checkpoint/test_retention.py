"""Which checkpoints are dropped, against the rules told one by one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import InputError
from training.checkpoint.retention import Retention, due, kept_for_good
from training.config import TrainConfig

STEPS = st.lists(st.integers(1, 60), max_size=30).map(sorted)


@given(
    STEPS,
    st.integers(1, 5),
    st.integers(0, 12),
    st.lists(st.integers(1, 60), max_size=4).map(tuple),
)
def test_dropped_are_those_that_no_rule_keeps(steps, newest, every, milestones):
    """Position by position: newest, multiple, or milestone."""
    kept = set()
    for position in range(len(steps)):
        if sum(1 for later in range(position + 1, len(steps))) < newest:
            kept.add(position)
        if every and steps[position] in range(0, 1000, every):
            kept.add(position)
        if steps[position] in list(milestones):
            kept.add(position)
    rules = Retention(newest=newest, every=every, milestones=milestones)
    assert set(rules.dropped(steps)) == set(range(len(steps))) - kept
    assert rules.dropped(steps) == sorted(rules.dropped(steps))


@given(STEPS, st.integers(1, 4), st.integers(0, 9), st.sets(st.integers(1, 60), max_size=3))
def test_dropping_as_one_goes_is_dropping_at_the_end(steps, newest, every, milestones):
    """A checkpoint that is dropped once would be dropped at any later time."""
    rules = Retention(newest=newest, every=every, milestones=tuple(milestones))
    left = []
    for step in steps:
        left.append(step)
        left = [s for i, s in enumerate(left) if i not in rules.dropped(left)]
    gone = rules.dropped(steps)
    assert left == [s for i, s in enumerate(steps) if i not in gone]


@given(
    st.integers(1, 200),
    st.integers(1, 50),
    st.integers(0, 50),
    st.sets(st.integers(1, 200), max_size=3),
)
def test_due(step, every, keep, milestones):
    """At multiples of either, at milestones and at the end; kept for good but for the first."""
    train = TrainConfig(
        steps=200,
        batch_size=1,
        sequence_length=2,
        checkpoint_every=every,
        keep_every=keep,
        milestones=tuple(milestones),
    )
    kept = step in milestones or step == 200 or (keep > 0 and step in range(keep, 201, keep))
    assert kept_for_good(step, train) == kept
    assert due(step, train) == (kept or step in range(every, 201, every))


@pytest.mark.parametrize("fields", [{"newest": 0}, {"every": -1}, {"milestones": (5, 0)}])
def test_impossible_rules_are_refused(fields):
    """By name."""
    with pytest.raises(InputError, match=next(iter(fields))):
        Retention(**fields)
