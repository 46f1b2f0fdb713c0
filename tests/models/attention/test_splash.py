"""Splash, interpreted, against the reference: masks, tiles, dtypes, devices and remat."""

from __future__ import annotations

import contextlib
import functools
import inspect

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

import models.named as hax
from models.attention import splash
from models.layers.axes import MeshAxes
from models.shape.splash_tiles import choose_way
from models.transformer import Forward
from tests.models import small
from tests.models.attention.attention_inputs import (
    attended,
    difference_from_reference,
    inputs,
    kernel_calls,
)


@contextlib.contextmanager
def tiled(queries, keys, compute, fused):
    """Builds every kernel with these tiles."""
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
        q_layout=splash.SEQ_MINOR,
        k_layout=splash.SEQ_MINOR,
        v_layout=splash.SEQ_MINOR,
    )
    with pytest.MonkeyPatch.context() as patch:
        splash.build.cache_clear()
        patch.setattr(splash, "block_sizes", lambda *_: sizes)
        yield
    splash.build.cache_clear()


difference = functools.partial(difference_from_reference, "splash")
"""Of splash from the reference, in the output and all three gradients."""


CASES = [
    pytest.param((2, 256, 2, 2, 128), {}, id="grouped"),
    pytest.param(
        (2, 256, 2, 2, 64), {"segmented": True, "soft_cap": 0.9, "window": 60}, id="everything"
    ),
    pytest.param((1, 256, 2, 1, 64), {}, id="multi_head", marks=pytest.mark.slow),
    pytest.param((1, 256, 1, 2, 64), {"soft_cap": 1.3}, id="soft_cap", marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "options"), CASES)
def test_equals_the_reference(shape, options):
    """With the tiles of the table."""
    assert difference(shape, **options) < 1e-5


@pytest.mark.parametrize(
    ("window", "fused"),
    [
        (100, False),
        (129, True),
        pytest.param(1, True, marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_several_tiles_equal_the_reference(window, fused):
    """Windows narrower than a tile, wider than one and as wide as two; both backward kernels."""
    with tiled(128, 128, 128, fused):
        assert difference((1, 384, 1, 2, 64), window=window) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("fused", [True, False])
def test_in_bfloat16(fused):
    """Sixteen bits in and out: the kernels' sums are wide, the fused one's partial sums are not."""
    with tiled(128, 128, 128, fused):
        shape = (1, 384, 1, 2, 64)
        assert (
            difference(shape, dtype=jnp.bfloat16, window=200, soft_cap=2.0, segmented=True) < 0.02
        )


@pytest.mark.slow
@settings(max_examples=3, phases=(Phase.explicit, Phase.generate))  # shrinking takes minutes
@given(
    tiles_of_row=st.integers(1, 3),
    groups=st.sampled_from([(1, 1), (2, 1), (1, 3)]),
    window=st.none() | st.integers(1, 400),
    soft_cap=st.none() | st.floats(0.5, 5),
    segmented=st.booleans(),
    fused=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_mask_equals_the_reference(
    tiles_of_row, groups, window, soft_cap, segmented, fused, seed
):
    """For any combination of what the mask may be."""
    shape = (1, 128 * tiles_of_row, *groups, 64)
    options = {"window": window, "soft_cap": soft_cap, "segmented": segmented}
    with tiled(128, 128, 128, fused):
        assert difference(shape, seed=seed, **options) < 2e-5


@pytest.mark.slow
@pytest.mark.parametrize("heads", [(), ("tensor",)])
def test_over_devices_equals_one_device(heads):
    """Under shard_map over batch and heads the kernel computes the same."""
    with jax.set_mesh(small.mesh(data=2, tensor=2)):
        mesh_axes = MeshAxes(("data",), heads)
        assert difference((4, 128, 2, 2, 64), segmented=True, mesh_axes=mesh_axes) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kv_heads", "way", "fused", "options"),
    [
        (1, "gathered", True, {"window": 150, "segmented": True}),
        (1, "zigzag", False, {}),
        (1, "zigzag", True, {"segmented": True}),
        (2, "heads", True, {"segmented": True, "soft_cap": 2.0}),
    ],
)
def test_positions_over_devices_equal_one_device(kv_heads, way, fused, options):
    """However the devices share a row, output and gradients are those of one device."""
    assert choose_way(kv_heads, True, options.get("window"), 2) == way
    with tiled(128, 128, 128, fused), jax.set_mesh(small.mesh(data=2, sequence=2)):
        mesh_axes = MeshAxes(("data",), (), ("sequence",))
        assert difference((2, 512, kv_heads, 2, 64), mesh_axes=mesh_axes, **options) < 1e-5


@pytest.mark.slow
def test_positions_heads_and_batch_over_devices():
    """All three at once, positions over two axes of the mesh, with the tiles of the table."""
    mesh_axes = MeshAxes(("data",), ("tensor",), ("outer", "inner"))
    options = {"window": 300, "segmented": True, "soft_cap": 2.0}
    with jax.set_mesh(small.mesh(data=1, outer=2, inner=2, tensor=2)):
        assert difference((1, 512, 2, 2, 64), mesh_axes=mesh_axes, **options) < 1e-5


@pytest.mark.slow
def test_axis_order_does_not_matter():
    """Inputs as the projections make them, features first."""
    q, k, v, _ = inputs(1, 128, 2, 2, 64)
    run = eqx.filter_jit(functools.partial(attended, backend="splash", interpret=True))
    want = run(q, k, v)
    turned = q.rearrange(("kv_heads", "q_per_kv", "head_size", "batch", "position"))
    moved = k.rearrange(("kv_heads", "head_size", "batch", "position"))
    got = run(turned, moved, v)
    assert small.relative(got.rearrange(want.axes), want) == 0


@pytest.mark.slow
def test_in_the_model_under_every_kind_of_remat():
    """The model's gradients do not depend on the back end or on what splash's residuals cost."""
    model = small.model(head_size=64, kv_heads=1, heads=2, layers=2, attention_soft_cap=3.0)
    rows = small.named(small.tokens(1, 128))

    def squares(**forward):
        return lambda model: (
            hax.sum(hax.square(model.hidden(rows, forward=Forward(**forward)))).array
        )

    want = small.gradient(squares(backend="reference", remat="none"), model)
    for remat in ("full", "save:queries,keys,values,attention_residuals"):
        objective = squares(backend="splash", interpret=True, remat=remat)
        assert small.relative(small.gradient(objective, model), want) < 2e-5


@pytest.mark.slow
def test_saved_residuals_spare_the_second_forward_kernel():
    """Full recomputation runs the forward kernel twice, saving its residuals once."""
    saving = kernel_calls("splash", "save:queries,keys,values,attention_residuals")
    assert saving == kernel_calls("splash", "none") == 2  # forward, and the fused backward
    assert kernel_calls("splash", "full") == 3


PARAMETERS = {
    "_splash_attention_bwd_dkv": (
        "q k v segment_ids sinks logsumexp do di bq bkv bkv_compute is_mqa mask_info mask_value "
        "attn_logits_soft_cap use_fused_bwd_kernel q_layout k_layout v_layout mask_function "
        "interpret"
    ),
    "_splash_attention_bwd_dq": (
        "q k v segment_ids sinks logsumexp do di bq bkv is_mqa mask_info mask_value "
        "attn_logits_soft_cap q_layout k_layout v_layout mask_function interpret"
    ),
}


@pytest.mark.parametrize(("name", "parameters"), PARAMETERS.items())
def test_the_private_kernels_of_jax_are_as_we_call_them(name, parameters):
    """Our differentiation rule calls them, and a new JAX may change them without notice."""
    kernel = getattr(splash_attention_kernel, name, None)
    assert kernel is not None, f"this JAX has no {name}: adapt models/attention/splash.py"
    found = " ".join(inspect.signature(kernel).parameters)
    assert found == parameters, (
        f"this JAX's {name} takes other arguments: read what changed and adapt `backward_kernels` "
        f"of models/attention/splash.py\nfound {found}"
    )
