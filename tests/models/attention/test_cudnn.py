"""What cuDNN is asked for; the kernels themselves run on an NVIDIA GPU only."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax._src.cudnn import fused_attention_stablehlo
from jax.ad_checkpoint import checkpoint_name, checkpoint_policies
from jax.export import DisabledSafetyCheck

import models.named as hax
from models.attention import cudnn
from models.attention.dispatch import attend
from models.attention.reference import Mask
from models.layers.axes import MeshAxes
from tests.models import small
from tests.models.attention.attention_inputs import inputs, value_and_gradients

CALLS = ("__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward")


@pytest.fixture
def installed(monkeypatch):
    """JAX lowers for a GPU that is not there, once it believes in cuDNN."""
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("groups", "window"), [((2, 1), None), ((2, 3), None), ((1, 4), 1), ((2, 3), 7), ((2, 1), 40)]
)
def test_the_arguments_mean_what_the_reference_means(groups, window):
    """JAX's plain implementation, told what cuDNN is told, gives the reference's numbers."""
    q, k, v, bar = inputs(2, 24, *groups, 16)
    want = value_and_gradients("reference", q, k, v, bar, window=window)

    @jax.jit
    def run(q, k, v, bar):
        options = cudnn.options(window)
        plain = functools.partial(jax.nn.dot_product_attention, implementation="xla", **options)
        out, back = jax.vjp(plain, q, k, v)
        return back(bar), out

    def merged(x):
        return x.flatten_axes(("kv_heads", "q_per_kv"), "heads").array

    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        got = run(merged(q), k.array, v.array, merged(bar))
    bars, out = want
    want = ((merged(bars[0]), bars[1].array, bars[2].array), merged(out))
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert abs(ours - theirs).max() < 1e-5


def lowered(function, *shapes):
    """The program for CUDA, as text without source locations."""
    checks = [DisabledSafetyCheck.custom_call(name) for name in CALLS]
    exported = jax.export.export(jax.jit(function), platforms=["cuda"], disabled_checks=checks)
    return re.sub(r"loc\([^)]*\)|#loc.*", "", exported(*shapes).mlir_module())


def shapes(position=256, head_size=64):
    q = jax.ShapeDtypeStruct((2, position, 4, head_size), jnp.bfloat16)
    kv = jax.ShapeDtypeStruct((2, position, 2, head_size), jnp.bfloat16)
    return q, kv, kv


def both(attention):
    """Output and gradients, the output being its own cotangent."""

    def run(q, k, v):
        out, back = jax.vjp(attention, q, k, v)
        return out, back(out)

    return run


def calls(program):
    """The kernels that a program calls, with all they are told, in order."""
    return re.findall(r"stablehlo.custom_call @(__cudnn.*)", program)


@pytest.mark.parametrize("window", [None, 100])
def test_our_rule_calls_the_kernels_as_jax_does(installed, window):
    """A JAX whose private rules differ from what we pass them shows here."""
    ours = functools.partial(cudnn.cudnn, window)
    options = cudnn.options(window)
    theirs = functools.partial(jax.nn.dot_product_attention, implementation="cudnn", **options)
    got, want = (calls(lowered(both(attention), *shapes())) for attention in (ours, theirs))
    assert [call.split("(")[0] for call in got] == list(CALLS)
    assert got == want
    for call in got:
        assert "CAUSAL" in call
        assert "fmha_scale\\22: 1.0" in call
        assert f"sliding_window_length\\22: {window or 0}" in call
    alone = lowered(ours, *shapes())
    assert alone.count("@__cudnn$") == 1


def test_saved_by_name_the_forward_kernel_runs_once(installed):
    """Its log-sum-exp has the name too; under JAX's own rule it would not."""
    ours = functools.partial(cudnn.cudnn, None)
    options = cudnn.options(None)
    theirs = functools.partial(jax.nn.dot_product_attention, implementation="cudnn", **options)
    by_name = checkpoint_policies.save_only_these_names("attention_residuals")

    def forward_kernels(attention, policy):
        def objective(q, k, v):
            named = checkpoint_name(attention(q, k, v), "attention_residuals")
            return jnp.sum(named.astype(jnp.float32) ** 2)

        checkpointed = jax.checkpoint(objective, policy=policy)
        gradient = jax.value_and_grad(checkpointed, argnums=(0, 1, 2))
        return lowered(gradient, *shapes()).count("@__cudnn$fmhaSoftmax(")

    assert forward_kernels(ours, by_name) == 1
    assert forward_kernels(theirs, by_name) == 2
    assert forward_kernels(ours, checkpoint_policies.nothing_saveable) == 2


@pytest.mark.slow
@pytest.mark.parametrize("heads", [(), ("tensor",)])
def test_through_the_common_call_and_over_devices(installed, heads):
    """Any axis order, and on each device the kernel of its rows and heads."""
    mesh, mesh_axes = small.mesh(data=2, tensor=2), MeshAxes(("data",), heads)
    named = [x.astype(jnp.bfloat16) for x in inputs(4, 128, 2, 2, 64)[:3]]
    turned = [x.rearrange((..., "batch", "position")) for x in named]

    def run(*arrays):
        arrays = [hax.named(x, y.axes) for x, y in zip(arrays, turned, strict=True)]
        out = attend(*arrays, Mask(window=50), backend="cudnn", mesh_axes=mesh_axes)
        assert {axis.name for axis in out.axes} == {axis.name for axis in named[0].axes}
        return out.array

    with jax.set_mesh(mesh):
        program = lowered(run, *(x.array for x in turned))
    (call,) = calls(program)
    local_heads = 2 if heads else 4
    assert f"(tensor<2x128x{local_heads}x64xbf16>" in call
    assert "sliding_window_length\\22: 50" in call
