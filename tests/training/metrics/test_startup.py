"""The parts of a start add up, and end once."""

from hypothesis import given
from hypothesis import strategies as st

from training.metrics.journal import Journal, read_journals
from training.metrics.startup import PARTS, Startup
from training.metrics.stopwatch import Stopwatch


class Clock:
    """Seconds that a test moves."""

    now = 100.0

    def __call__(self):
        return self.now


@given(st.lists(st.tuples(st.sampled_from(PARTS), st.integers(0, 100)), max_size=20))
def test_parts_add_up_to_the_time_until_the_last_that_ended(ends):
    """Whatever ends, in whatever order and however often; nothing counts after the first step."""
    clock, last = Clock(), 0.0
    startup = Startup({"starting": 2.0}, clock)
    for part, seconds in ends:
        clock.now += seconds
        if part not in startup.seconds() and PARTS[-1] not in startup.seconds():
            last = clock.now - 100.0
        startup.ended(part)
    assert sum(startup.seconds().values()) == 2.0 + last


def test_the_journal_has_the_parts(tmp_path):
    """Also whether the step was loaded; an account from before has neither."""
    clock = Clock()
    startup = Startup({"starting": 2.0}, clock)
    journal = Journal(str(tmp_path), "a", Stopwatch(), startup)
    clock.now += 3
    startup.ended("restoring")
    journal.begin(7, loaded=True)
    journal.close("finished")
    (found,) = read_journals(str(tmp_path))
    assert (found.startup, found.loaded) == ({"starting": 2.0, "restoring": 3.0}, True)
    old = found.to_json().replace(b', "startup": {"starting": 2.0, "restoring": 3.0}', b"")
    old = old.replace(b', "loaded": true', b"")
    assert (found.from_json(old).startup, found.from_json(old).loaded) == ({}, False)
