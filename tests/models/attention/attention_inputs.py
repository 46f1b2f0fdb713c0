"""Inputs that the tests of the attention back ends share."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import models.named as hax
from models.attention.dispatch import attend
from models.attention.reference import Mask
from tests.models import small


def inputs(batch, position, kv_heads, q_per_kv, head_size, seed=0, dtype=jnp.float32):
    """Random scaled queries, keys, values and output cotangent as named arrays."""
    rng = np.random.default_rng(seed)
    kv = {"batch": batch, "position": position, "kv_heads": kv_heads, "head_size": head_size}
    q = {"batch": batch, "position": position, "kv_heads": kv_heads}
    q |= {"q_per_kv": q_per_kv, "head_size": head_size}

    def draw(axes):
        return hax.named(jnp.asarray(rng.normal(size=tuple(axes.values())), dtype), tuple(axes))

    return draw(q) * head_size**-0.5, draw(kv), draw(kv), draw(q)


def segments(batch, position, seed=0):
    """Segment ids that start at random places, different in each row."""
    starts = np.random.default_rng(seed).random((batch, position)) < 4 / position
    return small.named(np.cumsum(starts, axis=1).astype(np.int32))


def attended(q, k, v, *, backend, mesh_axes=None, interpret=False, **mask):
    """`attend` with the fields of its mask as arguments."""
    how = {"mesh_axes": mesh_axes, "interpret": interpret}
    return attend(q, k, v, Mask(**mask), backend=backend, **how)


def value_and_gradients(backend, q, k, v, bar, **options):
    """Gradients of queries, keys and values, and the output in the order of `bar`."""

    @jax.jit
    def run(q, k, v):
        def objective(q, k, v):
            out = attended(q, k, v, backend=backend, **options)
            return hax.sum((out * bar).astype(jnp.float32)).array, out.rearrange(bar.axes)

        return jax.grad(objective, argnums=(0, 1, 2), has_aux=True)(q, k, v)

    return run(q, k, v)
