"""Causal attention by cuDNN's fused kernels, on NVIDIA GPUs.

They are called as `jax.nn.dot_product_attention` calls them. The differentiation rules are JAX's,
called from our own `jax.custom_vjp`: JAX's saves the output and the log-sum-exp without a
checkpoint name, and a remat policy that saves by name would then run the forward kernel twice. The
rules are private to JAX; pyproject caps jax, and a test checks that our calls equal JAX's own.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax._src.cudnn import fused_attention_stablehlo as fused
from jax.ad_checkpoint import checkpoint_name

from models.attention.reference import RESIDUALS
from models.jax_versions import NO_SCORE_MODIFIER, NO_SCORE_MODIFIER_ARRAYS


def options(window: int | None) -> dict[str, Any]:
    """Arguments of `jax.nn.dot_product_attention`."""
    # JAX counts the positions to the left and right of the query's own, `window` includes it.
    local = None if window is None else (window - 1, 0)
    return {"scale": 1.0, "is_causal": True, "local_window_size": local}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def cudnn(window: int | None, q: Array, k: Array, v: Array) -> Array:
    """Attention output with the axes and dtype of the queries, on one device.

    `q` are scaled [batch, position, heads, head_size], those of one key/value head adjacent; `k`
    and `v` are [batch, position, kv_heads, head_size]. JAX raises `RuntimeError` when cuDNN is not
    installed.
    """
    return jax.nn.dot_product_attention(q, k, v, implementation="cudnn", **options(window))


def _forward(
    window: int | None, q: Array, k: Array, v: Array
) -> tuple[Array, tuple[Array | None, ...]]:
    # Bias, lengths and offsets of queries and of keys, and two page tables: none is used.
    absent = jnp.zeros(0, q.dtype)
    arrays = (q, k, v, *(absent,) * 7, *NO_SCORE_MODIFIER_ARRAYS)
    out, residuals = fused._dot_product_attention_fwd_rule(*arrays, *_settings(window))
    log_sum_exp, _ = residuals[-2:]  # the last is the output
    out, log_sum_exp = (checkpoint_name(x, RESIDUALS) for x in (out, log_sum_exp))
    return out, (q, k, v, out, log_sum_exp)


def _backward(
    window: int | None, residuals: tuple[Array, ...], out_bar: Array
) -> tuple[Array, Array, Array]:
    q, k, v, out, log_sum_exp = residuals
    absent = jnp.zeros(0, q.dtype)
    saved = (q, k, v, *(absent,) * 7, *NO_SCORE_MODIFIER_ARRAYS, log_sum_exp, out)
    rule: Any = fused._dot_product_attention_bwd_rule
    q_bar, k_bar, v_bar, *_ = rule(*_settings(window), saved, out_bar)
    return q_bar, k_bar, v_bar


cudnn.defvjp(_forward, _backward)


def _settings(window: int | None) -> tuple[Any, ...]:
    """Static arguments of JAX's rules.

    In order: scale, dropout seed and rate, whether a bias and its gradient exist, mask, layout,
    window (own position included), the score modifier of JAX 0.12, cuDNN's version, and whether to
    return the log-sum-exp as well.
    """
    return (
        1.0,
        42,
        0.0,
        (False, False),
        fused.MaskType.CAUSAL,
        fused.AttentionLayout.BTNH.value,
        window,
        *NO_SCORE_MODIFIER,
        fused.check_cudnn_version(),
        False,
    )
