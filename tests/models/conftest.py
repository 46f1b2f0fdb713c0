"""Models must work where JAX refuses to guess: strict dtype promotion and no rank promotion."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True)
def nothing_implicit() -> Iterator[None]:
    """Run every test of this folder under strict promotion, compiled quickly rather than well."""
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        before = jax.config.values["jax_disable_most_optimizations"]
        jax.config.update("jax_disable_most_optimizations", True)
        yield
        jax.config.update("jax_disable_most_optimizations", before)
