"""Causal attention by JAX's splash kernel (Pallas for TPU), forward and backward.

The kernel never writes the scores to memory and skips blocks above the diagonal. It serves several
query heads with one key/value head, so keys and values are not repeated. It is called per row of
the batch under `jax.vmap`, and under `jax.shard_map` where the batch is spread over devices,
because the compiler cannot partition a kernel by itself.
"""

from __future__ import annotations

import dataclasses
import math
from typing import cast

import jax
from jax import Array
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel,
    splash_attention_mask,
)
from jax.sharding import Mesh, PartitionSpec

LANES = 128

BLOCKS_SHORT = (1024, 512, 256, 128)
BLOCKS_LONG = (2048, 1024, 512, 256, 128)
LONG_FROM = 8192
COMPUTE_BLOCK = 512
BACKWARD_BLOCK = 1024


@dataclasses.dataclass(frozen=True)
class AttentionSharding:
    """Where attention runs when the batch, and perhaps the heads, are spread over devices.

    Attributes:
        mesh: the devices.
        batch_axes: mesh axes that divide "batch".
        head_axes: mesh axes that divide "kv_heads".
    """

    mesh: Mesh
    batch_axes: tuple[str, ...]
    head_axes: tuple[str, ...] = ()

    @property
    def batch_shards(self) -> int:
        """Into how many pieces the batch is divided."""
        return math.prod(self.mesh.shape[name] for name in self.batch_axes)

    @property
    def head_shards(self) -> int:
        """Into how many pieces the heads are divided."""
        return math.prod(self.mesh.shape[name] for name in self.head_axes)


def why_not(position: int, head_size: int) -> str | None:
    """Why the kernel cannot run these shapes, or None when it can."""
    if position % LANES:
        return f"{position} positions are not a multiple of {LANES}"
    if head_size % 64:
        return f"a head size of {head_size} is not a multiple of 64"
    return None


def block_sizes(position: int) -> splash_attention_kernel.BlockSizes:
    """Tile sizes for a row length, a multiple of 128.

    The largest tile that divides the row: 2048 from 8,192 positions on, 1024 below, where half
    of a larger diagonal tile would be masked work. Scores are made 512 keys at a time, which keeps
    the scratch of a 2048 tile inside the scoped vector memory. From the v6e autotuning tables of
    openxla/tokamax (forward); nobody has published backward tables, so the backward pass keeps to
    1024. The kernel's own default of 128 is several times slower everywhere.
    """
    table = BLOCKS_LONG if position >= LONG_FROM else BLOCKS_SHORT
    block = next(size for size in table if position % size == 0)
    compute = min(block, COMPUTE_BLOCK)
    backward = min(block, BACKWARD_BLOCK)
    backward_compute = min(backward, COMPUTE_BLOCK)
    return splash_attention_kernel.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=compute,
        block_q_dkv=backward,
        block_kv_dkv=backward,
        block_kv_dkv_compute=backward_compute,
        block_q_dq=backward,
        block_kv_dq=backward,
    )


def splash(
    q_BHPD: Array,
    k_BKPD: Array,
    v_BKPD: Array,
    segment_ids_BP: Array | None,
    *,
    soft_cap: float | None,
    sharding: AttentionSharding | None,
    interpret: bool,
) -> Array:
    """Attention output [batch, heads, position, head_size] in the queries' dtype.

    Args:
        q_BHPD: queries, already scaled; heads of one key/value head are neighbours.
        k_BKPD: keys [batch, kv_heads, position, head_size].
        v_BKPD: values, same shape.
        segment_ids_BP: int32, or None.
        soft_cap: c in c * tanh(score / c), or None.
        sharding: mesh axes to run over, or None for one device.
        interpret: run in Pallas' interpreter.
    """

    def local(q: Array, k: Array, v: Array, *segments: Array) -> Array:
        kernel = _kernel(q.shape[1], q.shape[2], soft_cap, interpret)

        def one_row(q: Array, k: Array, v: Array, *segments: Array) -> Array:
            ids = [splash_attention_kernel.SegmentIds(q=row, kv=row) for row in segments]
            return cast(Array, kernel(q, k, v, *ids))  # without residuals it returns no tuple

        # The kernel's own indexing relies on NumPy's rank promotion.
        with jax.numpy_rank_promotion("allow"):
            return jax.vmap(one_row)(q, k, v, *segments)

    segments = () if segment_ids_BP is None else (segment_ids_BP,)
    if sharding is None:
        return local(q_BHPD, k_BKPD, v_BKPD, *segments)
    heads = PartitionSpec(sharding.batch_axes, sharding.head_axes)
    return jax.shard_map(
        local,
        mesh=sharding.mesh,
        in_specs=(heads,) * 3 + (PartitionSpec(sharding.batch_axes),) * len(segments),
        out_specs=heads,
        check_vma=False,
    )(q_BHPD, k_BKPD, v_BKPD, *segments)


def _kernel(
    heads: int, position: int, soft_cap: float | None, interpret: bool
) -> splash_attention_kernel.SplashAttentionKernel:
    mask = splash_attention_mask.CausalMask((position, position))
    return splash_attention_kernel.make_splash_mha(
        splash_attention_mask.MultiHeadMask([mask] * heads),
        block_sizes=block_sizes(position),
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=soft_cap,
        residual_checkpoint_name="attention_residuals",
        interpret=interpret,
    )
