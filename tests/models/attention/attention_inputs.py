"""Inputs that the tests of the attention back ends share."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel
from jax.interpreters import partial_eval

import models.named as hax
from models.attention import ponente, splash
from models.attention.dispatch import attend
from models.attention.reference import Mask
from models.shape.tpu_tiles import Sight
from models.transformer import Forward
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


def difference_from_reference(
    backend, shape, *, segmented=False, seed=0, dtype=jnp.float32, mesh_axes=None, **options
):
    """Of a kernel's output and all three gradients, at shape [batch, position, groups, size]."""
    arrays = inputs(*shape, seed=seed)
    options["segment_ids"] = segments(*shape[:2], seed) if segmented else None
    narrow = [x.astype(dtype) for x in arrays]
    want = value_and_gradients("reference", *(x.astype(jnp.float32) for x in narrow), **options)
    got = value_and_gradients(backend, *narrow, **options, mesh_axes=mesh_axes, interpret=True)
    # A window of one has gradients of zero: nothing to be relative to. All others are about one.
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return max(float(abs(g.astype(jnp.float32) - w).max() / max(abs(w).max(), 1)) for g, w in pairs)


@contextlib.contextmanager
def tiled(queries, keys, compute, fused):
    """Builds every splash kernel with these tiles."""
    sizes = splash_attention_kernel.BlockSizes(
        block_q=queries,
        block_kv=keys,
        block_kv_compute=compute,
        block_q_dkv=queries,
        block_kv_dkv=keys,
        block_kv_dkv_compute=compute,
        block_q_dq=None if fused else queries,
        block_kv_dq=None if fused else keys,
        use_fused_bwd_kernel=fused,
        **dict.fromkeys(("q_layout", "k_layout", "v_layout"), splash.SEQ_MINOR),
    )
    with pytest.MonkeyPatch.context() as patch:
        splash.build.cache_clear()
        patch.setattr(splash, "block_sizes", lambda *_: sizes)
        yield
    splash.build.cache_clear()


@contextlib.contextmanager
def small_blocks():
    """Makes every ponente kernel with blocks of 256 and chunks of 128, where they divide a row."""

    def choose(row):
        return Sight(256 if row.queries % 256 == 0 else 128, 128, row.window)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ponente, "choose_sight", choose)
        yield


def kernel_calls(backend, remat):
    """Calls of a kernel in the gradient of a small model."""
    model = small.model(head_size=64, layers=2)
    rows = small.named(small.tokens(1, 128))

    def objective(model):
        out = model.hidden(rows, forward=Forward(backend=backend, interpret=True, remat=remat))
        return hax.sum(out).array

    program = jax.make_jaxpr(jax.grad(objective))(model).jaxpr
    # Without the dead code that every compiler removes, among it unused recomputation.
    program, _ = partial_eval.dce_jaxpr(program, [True] * len(program.outvars))
    return _count(program, "pallas_call")


def _count(program, primitive):
    """How often a primitive occurs in a program and the programs inside it."""
    inner = [
        part
        for equation in program.eqns
        for value in equation.params.values()
        for part in (value if isinstance(value, (tuple, list)) else (value,))
    ]
    inner = [getattr(part, "jaxpr", part) for part in inner]
    here = sum(equation.primitive.name == primitive for equation in program.eqns)
    return here + sum(_count(part, primitive) for part in inner if hasattr(part, "eqns"))
