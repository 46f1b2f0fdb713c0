"""Causal attention by JAX's splash kernel (Pallas for TPU), forward and backward.

One key/value head serves several query heads, so keys and values are not repeated. The kernel takes
one sequence: it is batched by `jax.vmap`, and runs under `jax.shard_map` where arrays are sharded,
because the compiler cannot partition it. For sharded positions see
`models.attention.context_parallel`.

The differentiation rule is ours. The kernel's own saves its output as [heads, position, head_size],
which the TPU pads to 128 lanes: heads of 64 take twice the memory, in every layer. Ours saves it as
[query_features, position], as the next matmul reads it. `_splash_attention_bwd_dkv` and
`_splash_attention_bwd_dq` are private to JAX; pyproject caps jax, and a test checks their
parameters.

In the fused backward kernel each block of keys writes its partial sum of the queries' gradients:
[batch, key blocks, heads, position, head_size], 1 GiB for 8 sequences of 8,192 positions, 16 heads
of 64 or 128 and key blocks of 2048.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel,
    splash_attention_mask,
)
from jax.sharding import NamedSharding, PartitionSpec

from models.attention.context_parallel import divided, zigzag_order
from models.attention.reference import RESIDUALS, Mask
from models.layers.axes import MeshAxes
from models.shape.splash_tiles import choose_tiles

SEQ_MINOR = splash_attention_kernel.QKVLayout.SEQ_MINOR

SegmentIds = splash_attention_kernel.SegmentIds
SplashKernel = splash_attention_kernel.SplashAttentionKernel


@dataclasses.dataclass(frozen=True)
class Kernel:
    """Static description of a kernel; `build` caches one kernel for each value."""

    heads: int
    position: int
    head_size: int
    window: int | None
    soft_cap: float | None
    sequence_shards: int = 1  # devices that share the queries of a sequence
    zigzag: bool = False  # each device has a chunk from the front and one from the back
    rows: int = 1  # sequences of one device, batched by vmap
    interpret: bool = False


@functools.cache
def block_sizes(
    position: int,
    head_size: int,
    window: int | None = None,
    sequence_shards: int = 1,
    heads: int = 1,
) -> splash_attention_kernel.BlockSizes:
    """The result of `choose_tiles` as the kernel takes it.

    Positions are in the minor axis, as the projections write them: heads of 64 are then not padded,
    and for wider ones the other order saves less than the transposes would cost.
    """
    tiles = choose_tiles(position, head_size, window, sequence_shards, heads)
    layouts = dict.fromkeys(("q_layout", "k_layout", "v_layout"), SEQ_MINOR)
    return splash_attention_kernel.BlockSizes(**dataclasses.asdict(tiles), **layouts)


@functools.cache
def build(kernel: Kernel) -> SplashKernel:
    """JAX's kernel for one sequence, which also returns the log-sum-exp; its masks are NumPy."""
    shape = (kernel.position, kernel.position)
    if kernel.window is None:
        mask = splash_attention_mask.CausalMask(shape)
        if kernel.zigzag:
            mask.q_sequence = zigzag_order(kernel.position, kernel.sequence_shards)
    else:
        mask = splash_attention_mask.LocalMask(shape, (kernel.window - 1, 0), 0)
    chunks = 2 if kernel.zigzag else 1  # per device; a tile may not cross chunks
    sizes = block_sizes(
        kernel.position,
        kernel.head_size,
        kernel.window,
        kernel.sequence_shards * chunks,
        kernel.rows * kernel.heads * chunks,
    )
    with jax.ensure_compile_time_eval():
        built = splash_attention_kernel.make_splash_mha(
            splash_attention_mask.MultiHeadMask([mask] * kernel.heads),
            block_sizes=sizes,
            head_shards=1,
            q_seq_shards=kernel.sequence_shards,
            attn_logits_soft_cap=kernel.soft_cap,
            save_residuals=True,
            interpret=kernel.interpret,
        )
        return jax.tree.map(np.asarray, built)


def splash(
    q_BHPD: Array,
    k_BKPD: Array,
    v_BKPD: Array,
    mask: Mask,
    *,
    mesh_axes: MeshAxes | None,
    interpret: bool,
) -> Array:
    """Attention output [batch, heads * head_size, position] in the queries' dtype.

    Queries are scaled [batch, heads, position, head_size], those of one key/value head adjacent;
    keys and values [batch, kv_heads, position, head_size]. `mesh_axes` divide them over the mesh.
    """
    batch, heads, position, head_size = q_BHPD.shape
    window, soft_cap, ids_BP = mask.window, mask.soft_cap, mask.ids_BP
    kernel = Kernel(heads, position, head_size, window, soft_cap, rows=batch, interpret=interpret)
    if mesh_axes is None:
        return _attention(build(kernel), q_BHPD, k_BKPD, v_BKPD, ids_BP, ids_BP)
    exchange, way = divided(mesh_axes, k_BKPD.shape[1], position, window)
    of_heads = mesh_axes.shards(mesh_axes.heads) * (exchange.shards if way == "heads" else 1)
    by_queries = way in ("zigzag", "gathered")
    run = build(
        dataclasses.replace(
            kernel,
            heads=heads // of_heads,
            rows=batch // mesh_axes.shards(mesh_axes.batch),
            sequence_shards=exchange.shards if by_queries else 1,
            zigzag=way == "zigzag",
        )
    )

    def local(run: SplashKernel, *arrays: Any) -> Array:
        return exchange.attend(functools.partial(_attention, run), way, 2, *arrays)

    rows, by_heads, sequence = (
        axes or None for axes in (mesh_axes.batch, mesh_axes.heads, mesh_axes.sequence)
    )
    by_head = PartitionSpec(rows, by_heads, sequence)
    masked = PartitionSpec(None, sequence if by_queries else None)
    return jax.shard_map(
        local,
        in_specs=(
            run.manual_sharding_spec(NamedSharding(jax.sharding.get_abstract_mesh(), masked)),
            by_head,
            by_head,
            by_head,
            None if ids_BP is None else PartitionSpec(rows, sequence),
        ),
        out_specs=by_head,
        check_vma=False,
    )(run, q_BHPD, k_BKPD, v_BKPD, ids_BP)


@jax.custom_vjp
def _attention(
    run: SplashKernel, q: Array, k: Array, v: Array, q_ids: Array | None, kv_ids: Array | None
) -> Array:
    return _forward(run, q, k, v, q_ids, kv_ids)[0]


def _forward(
    run: SplashKernel, q: Array, k: Array, v: Array, q_ids: Array | None, kv_ids: Array | None
) -> tuple[Array, tuple[Any, ...]]:
    def one_row(q: Array, k: Array, v: Array, *ids: Array | None) -> tuple[Array, Array]:
        out, (log_sum_exp,) = run(q, k, v, _segment_ids(*ids))
        return out, log_sum_exp

    # The indexing inside the kernel relies on NumPy's rank promotion.
    with jax.numpy_rank_promotion("allow"):
        out, log_sum_exp = jax.vmap(one_row)(q, k, v, q_ids, kv_ids)
    # [batch, heads, position, head_size] to [batch, heads * head_size, position].
    merged = out.swapaxes(2, 3).reshape(len(q), -1, q.shape[2])
    out, log_sum_exp = (checkpoint_name(x, RESIDUALS) for x in (merged, log_sum_exp))
    return out, (run, q, k, v, q_ids, kv_ids, out, log_sum_exp)


def _backward(
    residuals: tuple[Any, ...], out_bar: Array
) -> tuple[None, Array, Array, Array, None, None]:
    run, q, k, v, q_ids, kv_ids, out, log_sum_exp = residuals
    batch, heads, position, head_size = q.shape
    # d/ds = p * (d/dp - inner) for the softmax p of the scores s, with inner = sum_k p_k (d/dp)_k,
    # which equals <out, d/dout>. Computed from [head_size, position], where heads are not padded.
    by_head = (batch, heads, head_size, position)
    wide, wide_bar = (x.reshape(by_head).astype(jnp.float32) for x in (out, out_bar))
    inner = jnp.sum(wide * wide_bar, axis=2)

    def one_row(*row: Any) -> tuple[Array, Array, Array]:
        q, k, v, q_ids, kv_ids, *rest = row
        ids = _segment_ids(q_ids, kv_ids)
        return backward_kernels(run, (q, k, v, ids, None, *rest))

    heads_apart = out_bar.reshape(by_head).swapaxes(2, 3)
    rows = (q, k, v, q_ids, kv_ids, log_sum_exp, heads_apart, inner)
    with jax.numpy_rank_promotion("allow"):
        q_bar, k_bar, v_bar = jax.vmap(one_row)(*rows)
    return None, q_bar, k_bar, v_bar, None, None


def backward_kernels(run: SplashKernel, arrays: tuple[Any, ...]) -> tuple[Array, Array, Array]:
    """Cotangents of one sequence's queries, keys and values, by JAX's backward kernel or kernels.

    `arrays` are the kernels' positional arguments.
    """
    settings, blocks = run.kwargs, run.kwargs["block_sizes"]
    common = {
        name: settings[name]
        for name in ("is_mqa", "mask_value", "attn_logits_soft_cap", "mask_function", "interpret")
    }
    common |= {name: getattr(blocks, name) for name in ("q_layout", "k_layout", "v_layout")}
    keys_values: Any = splash_attention_kernel._splash_attention_bwd_dkv
    q_bar, k_bar, v_bar = keys_values(
        *arrays,
        bq=blocks.block_q_dkv,
        bkv=blocks.block_kv_dkv,
        bkv_compute=blocks.block_kv_dkv_compute,
        mask_info=run.dkv_mask_info,
        use_fused_bwd_kernel=blocks.use_fused_bwd_kernel,
        **common,
    )
    if not blocks.use_fused_bwd_kernel:
        queries: Any = splash_attention_kernel._splash_attention_bwd_dq
        q_bar = queries(
            *arrays,
            bq=blocks.block_q_dq,
            bkv=blocks.block_kv_dq,
            mask_info=run.dq_mask_info,
            **common,
        )
    return q_bar, k_bar, v_bar


_attention.defvjp(_forward, _backward)


def _segment_ids(q_ids: Array | None, kv_ids: Array | None) -> SegmentIds | None:
    return None if q_ids is None or kv_ids is None else SegmentIds(q=q_ids, kv=kv_ids)
