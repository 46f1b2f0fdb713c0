"""Cheap compilation: most tests compile the same few programs, and none needs them to be fast."""

from __future__ import annotations

import os

import pytest

SETTINGS = {
    "jax_disable_most_optimizations": True,
    "jax_persistent_cache_min_compile_time_secs": 0.05,
}


@pytest.fixture(scope="session", autouse=True)
def cheap_compilation(tmp_path_factory):
    """Compile without optimisations, and keep programs in a folder of this session only.

    Its workers share it: each folder of theirs lies in the session's.
    """
    import jax

    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "compiled"
    settings = {**SETTINGS, "jax_compilation_cache_dir": str(folder)}
    old = {name: jax.config.values[name] for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    yield
    for name, value in old.items():
        jax.config.update(name, value)


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
        checkpointer.close()
