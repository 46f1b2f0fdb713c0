"""What the tests of training share."""

from __future__ import annotations

import signal

import pytest


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A folder with the tiny run's token shards."""
    from tests.training.tiny import write_data

    root = str(tmp_path_factory.mktemp("data"))
    write_data(root)
    return root


@pytest.fixture
def sigterm():
    """Restores the handler, which a preempted run keeps until its process has left."""
    old = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, old)


@pytest.fixture
def new_checkpointer(tmp_path):
    """Makes checkpointers of the test's directory, closed at its end."""
    from tests.training.tiny import Heard
    from training.checkpoint.checkpointer import Checkpointer

    made = []

    def make(**options):
        methods = {name: options.pop(name) for name in {*options} & {"commit", "drop", "event"}}
        options = {"attempt": "a", **options}
        made.append(Checkpointer(str(tmp_path), Heard(**methods), **options))
        return made[-1]

    yield make
    for checkpointer in made:
        checkpointer.wait()
