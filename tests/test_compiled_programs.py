"""A test session gives back the memory maps of programs it has no more use for."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from tests import conftest


@pytest.mark.slow
def test_programs_are_dropped_before_the_maps_run_out(monkeypatch):
    """Below the limit nothing is dropped; above it, what twenty shapes were compiled to."""
    run = jax.jit(lambda x: jnp.sin(x) + 1)
    for size in range(1, 21):
        run(jnp.ones(size))
    full = conftest.memory_maps()
    conftest.drop_programs(most=full * 2)
    assert run._cache_size() == 20
    conftest.drop_programs(most=full // 2)
    assert run._cache_size() == 0
    assert conftest.memory_maps() < full - 20
