"""Which checkpoints are dropped, against the rules told one by one."""

from hypothesis import given
from hypothesis import strategies as st

from training.config import TrainConfig
from training.config.batch_schedule import dropped, due, kept_for_good


def rules(newest, every, milestones):
    return TrainConfig(
        batch_size=1, keep_checkpoints=newest, keep_every=every, milestones=tuple(milestones)
    )


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
    found = dropped(steps, rules(newest, every, milestones))
    assert found == sorted(set(range(len(steps))) - kept)


@given(STEPS, st.integers(1, 4), st.integers(0, 9), st.sets(st.integers(1, 60), max_size=3))
def test_dropping_as_one_goes_is_dropping_at_the_end(steps, newest, every, milestones):
    """A checkpoint that is dropped once would be dropped at any later time."""
    train, left = rules(newest, every, milestones), []
    for step in steps:
        left.append(step)
        left = [s for i, s in enumerate(left) if i not in dropped(left, train)]
    gone = dropped(steps, train)
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
