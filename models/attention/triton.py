"""Causal attention within documents on NVIDIA GPUs, by the Triton kernels that come with JAX.

They take segment ids, which cuDNN's do not get (docs/decisions), and as many key/value heads as
query heads: those of a group are repeated before, and their gradients added in float32 behind the
kernel. The rule of differentiation is JAX's, called from our own `jax.custom_vjp`, for the reason
that `models.attention.cudnn` gives.
"""

from __future__ import annotations

import functools
import warnings

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from models.attention.reference import RESIDUALS

with warnings.catch_warnings():  # that tokamax, which supports fewer versions of JAX, has them too
    warnings.simplefilter("ignore", DeprecationWarning)
    from jax.experimental.pallas.ops.gpu import attention as kernels

# Measured on an H200, heads of 64 and 128; see docs/gpus.md.
_TILES = kernels.BlockSizes(
    block_q=128, block_k=64, block_q_dkv=64, block_kv_dkv=64, block_q_dq=64, block_kv_dq=64
)
_WARPS = 4


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def triton(interpret: bool, q: Array, k: Array, v: Array, segment_ids: Array) -> Array:
    """Attention output with the axes and dtype of the queries, on one device.

    Arrays are those of `models.attention.cudnn`, and int32 ids [batch, position]. `interpret` runs
    the kernels in the Pallas interpreter.
    """
    return _forward(interpret, q, k, v, segment_ids)[0]


def _forward(
    interpret: bool, q: Array, k: Array, v: Array, segment_ids: Array
) -> tuple[Array, tuple[Array, ...]]:
    keys, values = (_repeated(x, q.shape[2]) for x in (k, v))
    out, log_sum_exp = kernels.mha(
        *(q, keys, values, segment_ids),
        causal=True,
        block_sizes=_TILES,
        num_warps=_WARPS,
        interpret=interpret,
        return_residuals=True,
    )
    out, log_sum_exp = (checkpoint_name(x, RESIDUALS) for x in (out, log_sum_exp))
    return out, (q, k, v, segment_ids, out, log_sum_exp)


def _backward(
    interpret: bool, residuals: tuple[Array, ...], out_bar: Array
) -> tuple[Array, Array, Array, None]:
    q, k, v, *rest = residuals
    keys, values = (_repeated(x, q.shape[2]) for x in (k, v))
    # Scale, causal, tiles, back end, warps, stages, grid, interpreter, debugging, residuals.
    settings = (1.0, True, _TILES, "triton", _WARPS, 2, None, interpret, False, False)
    bars = kernels._mha_backward(*settings, (q, keys, values, *rest), out_bar)
    q_bar, k_bar, v_bar = bars[:3]
    return q_bar, _added(k_bar, k), _added(v_bar, v), None


triton.defvjp(_forward, _backward)


def _repeated(x_BPKD: Array, heads: int) -> Array:
    return jnp.repeat(x_BPKD, heads // x_BPKD.shape[2], axis=2)


def _added(bar_BPHD: Array, like_BPKD: Array) -> Array:
    batch, position, kv_heads, size = like_BPKD.shape
    groups = bar_BPHD.reshape(batch, position, kv_heads, -1, size)
    return jnp.sum(groups, axis=3, dtype=jnp.float32).astype(like_BPKD.dtype)
