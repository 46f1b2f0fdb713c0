"""What the tests of training share."""

from __future__ import annotations

import pytest


@pytest.fixture
def new_checkpointer(tmp_path):
    """Makes checkpointers of the test's directory, closed at its end."""
    from training.checkpoint.checkpointer import Checkpointer

    made = []

    def make(**options):
        made.append(Checkpointer(str(tmp_path), **{"attempt": "a", **options}))
        return made[-1]

    yield make
    for checkpointer in made:
        checkpointer.wait()
