"""The kernels for documents on GPUs, in Pallas's interpreter; they run on an NVIDIA GPU only."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_policies

from models.attention.dispatch import attend
from models.attention.reference import Mask
from models.layers.axes import MeshAxes
from tests.models import small
from tests.models.attention.attention_inputs import inputs, segments, value_and_gradients


@pytest.mark.slow
@pytest.mark.parametrize(("groups", "head_size"), [((2, 1), 64), ((1, 3), 64), ((2, 2), 128)])
def test_output_and_gradients_are_the_references(groups, head_size):
    """Documents that begin anywhere, heads that share keys; both round to bfloat16."""
    arrays = inputs(2, 256, *groups, head_size, dtype=jnp.bfloat16)
    ids = segments(2, 256)
    got = value_and_gradients("triton", *arrays, segment_ids=ids, interpret=True)
    exact = [x.astype(jnp.float32) for x in arrays]
    want = value_and_gradients("reference", *exact, segment_ids=ids)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert small.relative(ours.astype(jnp.float32), theirs) < 0.01


@pytest.mark.slow
def test_devices_have_their_batch_and_heads():
    """Sharded over batch and heads, the output is that of one device."""
    *qkv, _ = inputs(4, 128, 2, 1, 64, dtype=jnp.bfloat16)
    mask = Mask(segment_ids=segments(4, 128))

    @jax.jit
    def run(q, k, v):
        return attend(q, k, v, mask, backend="triton", interpret=True, mesh_axes=axes).array

    axes = None
    one = run(*qkv)
    axes = MeshAxes(("data",), heads=("tensor",))
    jax.clear_caches()
    with jax.set_mesh(small.mesh(data=2, tensor=2)):
        several = run(*qkv)
    assert small.relative(several, one) < 1e-6


@pytest.mark.slow
def test_a_policy_by_name_runs_the_forward_kernel_once():
    """Output and log-sum-exp have the name that remat policies save."""
    *qkv, bar = inputs(1, 128, 1, 1, 64, dtype=jnp.bfloat16)
    mask = Mask(segment_ids=segments(1, 128))

    def objective(q, k, v):
        out = attend(q, k, v, mask, backend="triton", interpret=True)
        return jnp.sum((out * bar).array.astype(jnp.float32))

    policy = checkpoint_policies.save_only_these_names("attention_residuals")
    saved = jax.checkpoint(objective, policy=policy)
    text = str(jax.make_jaxpr(jax.grad(saved, argnums=(0, 1, 2)))(*qkv))
    assert text.count("name=mha_forward") == 1
    assert text.count("name=mha_backward") == 1
