"""Splash, interpreted, against the reference: masks, tiles, dtypes, devices and remat."""

from __future__ import annotations

import functools
import inspect

import jax.numpy as jnp
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

from tests.models.attention.attention_inputs import difference_from_reference, tiled

difference = functools.partial(difference_from_reference, "splash")
"""Of splash from the reference, in the output and all three gradients."""


CASES = [
    pytest.param((2, 256, 2, 2, 128), {}, id="grouped"),
    pytest.param(
        (2, 256, 2, 2, 64), {"segmented": True, "soft_cap": 0.9, "window": 60}, id="everything"
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "options"), CASES)
def test_equals_the_reference(shape, options):
    """With the tiles of the table."""
    assert difference(shape, **options) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(("window", "fused"), [(100, False), (129, True)])
def test_several_tiles_equal_the_reference(window, fused):
    """Windows narrower and wider than a tile; both backward kernels."""
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
