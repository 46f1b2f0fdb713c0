"""The settings of JAX that decide numbers, which an environment variable may change elsewhere.

A key names one model. JAX reads its settings from variables such as `JAX_DEFAULT_PRNG_IMPL`, which
no key has, so everything that initializes, trains, scores or generates runs in `fixed_numerics`.
There programs hold no source lines either: a kernel for TPUs would have others in each process, and
JAX's compilation cache would not know it again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

PRNG = "threefry2x32"
FIXED: dict[str, Any] = {
    "jax_default_prng_impl": PRNG,
    "jax_threefry_partitionable": True,
    "jax_random_seed_offset": 0,
    "jax_high_dynamic_range_gumbel": False,
    "jax_enable_x64": False,
    "jax_default_matmul_precision": None,
    "jax_softmax_custom_jvp": False,
    "jax_traceback_in_locations_limit": 0,
}
"""JAX's defaults but for the last; settings that only check or log are left alone."""

_lock = threading.Lock()
_inside = 0
_before: dict[str, Any] = {}


@contextmanager
def fixed_numerics() -> Iterator[None]:
    """A context, or a decorator: until the last ends, JAX has the settings `FIXED` everywhere."""
    global _inside
    with _lock:
        if not _inside:
            _before.update({name: getattr(jax.config, name) for name in FIXED})
            _update(FIXED)
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                _update(_before)


@contextmanager
def exact_products(compute_dtype: DTypeLike) -> Iterator[None]:
    """A context, or a decorator, for tracing: float32 products are float32 if all are to be.

    By default TPUs round the operands of such a product to bfloat16, and GPUs to TF32. Kernels for
    TPUs refuse this precision for operands of bfloat16, hence not in `FIXED`.
    """
    if jnp.dtype(compute_dtype) != jnp.float32:
        yield
        return
    # `fixed_numerics` first: inside, it would take the precision of this thread for the caller's.
    with fixed_numerics(), jax.default_matmul_precision("float32"):
        yield


@fixed_numerics()
def random_key(seed: int) -> jax.Array:
    """A random key of the generator that all models are initialized and sampled with."""
    return jax.random.key(seed, impl=PRNG)


def _update(settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        jax.config.update(name, value)
