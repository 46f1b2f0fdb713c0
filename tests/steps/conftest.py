"""A trained model that several files ask."""

from __future__ import annotations

import pytest

from pipeline.store import storage
from tests.steps.mini import run


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """The directory of a train step in a store, of a model trained for a few steps."""
    store = str(tmp_path_factory.mktemp("store"))
    assert run(store, "run", "--until", "train") == 0
    (name,) = (name for name in storage.list_names(store) if name.startswith("train-"))
    return storage.join(store, name)
