"""The back end of our own TPU kernel: its tiles, its derivative, and sequences on several devices.

One key/value head serves several query heads, and a grid step has one sequence, so nothing is
repeated or batched. Where arrays are sharded the kernel runs under `jax.shard_map`, because the
compiler cannot partition a kernel; for sharded positions see `models.attention.context_parallel`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from models.attention.context_parallel import Exchange
from models.attention.reference import Mask
from models.attention.tpu_kernel import backward, forward
from models.attention.tpu_scores import Ids, Shape
from models.layers.axes import MeshAxes
from models.shape.splash_tiles import LANES, choose_way
from models.shape.tpu_tiles import Row, buffers_of, choose_sight, needs_shift

RESIDUALS = "attention_residuals"


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attention(shape: Shape, starts: Array, q: Array, k: Array, v: Array, ids: Ids) -> Array:
    """Attention's output, differentiable by `q`, `k` and `v`; arguments are those of `forward`."""
    return _forward(shape, starts, q, k, v, ids)[0]


def _forward(
    shape: Shape, starts: Array, q: Array, k: Array, v: Array, ids: Ids
) -> tuple[Array, tuple[Any, ...]]:
    # The interpreter's indexing relies on NumPy's rank promotion.
    with jax.numpy_rank_promotion("allow"):
        results = forward(shape, starts, q, k, v, ids)
    out, log_sum_exp = (checkpoint_name(each, RESIDUALS) for each in results)
    return out, (starts, (q, k, v), ids, (out, log_sum_exp))


def _backward(shape: Shape, residuals: tuple[Any, ...], out_bar: Array) -> tuple[Any, ...]:
    starts, arrays, ids, results = residuals
    with jax.numpy_rank_promotion("allow"):
        return None, *backward(shape, starts, arrays, ids, results, out_bar), None


attention.defvjp(_forward, _backward)


def shape_of(
    q: Array, k: Array, mask: Mask, *, stretches: int = 1, interpret: bool = False
) -> Shape:
    """The kernel for these arrays, whose queries are that many contiguous stretches."""
    heads, head_size, queries = q.shape[1:]
    shift = needs_shift(mask.normalized, mask.soft_cap)
    row = Row(queries // stretches, k.shape[3], head_size, mask.window, shift)
    sight, segments = choose_sight(row), mask.segment_ids is not None
    return Shape(
        heads=heads,
        kv_heads=k.shape[1],
        queries=queries,
        keys=k.shape[3],
        head_size=head_size,
        sight=sight,
        soft_cap=mask.soft_cap,
        segments=segments,
        shift=shift,
        buffers=buffers_of(row, sight, q.dtype.itemsize, segments),
        interpret=interpret,
    )


def ponente(
    q_BHSP: Array,
    k_BKSP: Array,
    v_BKSP: Array,
    mask: Mask,
    *,
    mesh_axes: MeshAxes | None,
    interpret: bool,
) -> Array:
    """Attention output [batch, heads, head_size, position] in the queries' dtype.

    `q_BHSP` are scaled queries [batch, heads, head_size, position], those of one key/value head
    adjacent, `k_BKSP` and `v_BKSP` [batch, kv_heads, head_size, position]. `mesh_axes`
    divide the arrays over the current mesh; None for one device.
    """

    def local(q: Array, k: Array, v: Array, ids: Ids, firsts: tuple[Any, ...] = (0,)) -> Array:
        """Attention of queries in stretches that begin at the positions `firsts`."""
        shape = shape_of(q, k, mask, stretches=len(firsts), interpret=interpret)
        ends = jnp.arange(0, shape.queries // len(firsts), shape.sight.block, dtype=jnp.int32)
        starts = jnp.concatenate([ends + first for first in firsts])
        return attention(shape, starts, q, k, v, ids)

    run, ids_BP = functools.partial(_whole, local), mask.ids_BP
    if mesh_axes is None:
        return run(q_BHSP, k_BKSP, v_BKSP, ids_BP)
    rows, by_heads, sequence = (
        axes or None for axes in (mesh_axes.batch, mesh_axes.heads, mesh_axes.sequence)
    )
    exchange = Exchange(mesh_axes.sequence, mesh_axes.shards(mesh_axes.sequence))
    if exchange.shards > 1:
        kv_heads = k_BKSP.shape[1] // mesh_axes.shards(mesh_axes.heads)
        chunk_fits = q_BHSP.shape[3] % (2 * exchange.shards * LANES) == 0
        way = choose_way(kv_heads, chunk_fits, mask.window, exchange.shards)
        divided = {"heads": _by_heads, "zigzag": _by_zigzag, "gathered": _by_queries}[way]
        run = functools.partial(divided, local, exchange)
    by_head = PartitionSpec(rows, by_heads, None, sequence)
    of_ids = None if ids_BP is None else PartitionSpec(rows, sequence)
    return jax.shard_map(
        run, in_specs=(by_head, by_head, by_head, of_ids), out_specs=by_head, check_vma=False
    )(q_BHSP, k_BKSP, v_BKSP, ids_BP)


def _whole(local: Any, q: Array, k: Array, v: Array, ids: Array | None) -> Array:
    return local(q, k, v, None if ids is None else (ids, ids))


def _by_heads(
    local: Any, exchange: Exchange, q: Array, k: Array, v: Array, ids: Array | None
) -> Array:
    """Attention of all positions for this device's share of the heads."""
    q, k, v = (exchange.to_heads(x, 3) for x in (q, k, v))
    ids = None if ids is None else exchange.gather(ids, 1)
    return exchange.to_positions(_whole(local, q, k, v, ids), 3)


def _by_queries(
    local: Any, exchange: Exchange, q: Array, k: Array, v: Array, ids: Array | None
) -> Array:
    """Attention of this device's queries to the keys and values of all positions."""
    both = None if ids is None else (ids, exchange.gather(ids, 1))
    first = lax.axis_index(exchange.axes) * q.shape[3]
    return local(q, exchange.gather(k, 3), exchange.gather(v, 3), both, (first,))


def _by_zigzag(
    local: Any, exchange: Exchange, q: Array, k: Array, v: Array, ids: Array | None
) -> Array:
    """As `_by_queries`, of a stretch from the front of the sequence and one from its back."""
    both = None if ids is None else (exchange.to_zigzag(ids, 1), exchange.gather(ids, 1))
    device, stretch = lax.axis_index(exchange.axes), q.shape[3] // 2
    firsts = device * stretch, (2 * exchange.shards - 1 - device) * stretch
    k, v = exchange.gather(k, 3), exchange.gather(v, 3)
    out = local(exchange.to_zigzag(q, 3), k, v, both, firsts)
    return exchange.from_zigzag(out, 3)
