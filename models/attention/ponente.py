"""The back end of our own TPU kernel: its tiles, its derivative, and sequences on several devices.

One key/value head serves several query heads, and a grid step has one sequence, so nothing is
repeated or batched. Sharded arrays are under `jax.shard_map`: the compiler cannot partition a
kernel. For sharded positions see `models.attention.context_parallel`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from models.attention.context_parallel import divided
from models.attention.reference import RESIDUALS, Mask
from models.attention.tpu_kernel import backward, forward
from models.attention.tpu_scores import Ids, Shape
from models.layers.axes import MeshAxes
from models.shape.tpu_tiles import Row, buffers_of, choose_sight, needs_shift


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

    Queries are scaled and have the output's axes, those of one key/value head adjacent; keys and
    values are [batch, kv_heads, head_size, position]. `mesh_axes` divide them over the mesh.
    """

    def local(firsts: tuple[Any, ...], q: Array, k: Array, v: Array, *ids: Array | None) -> Array:
        """Attention of queries in stretches that begin at the positions `firsts`."""
        shape = shape_of(q, k, mask, stretches=len(firsts), interpret=interpret)
        ends = jnp.arange(0, shape.queries // len(firsts), shape.sight.block, dtype=jnp.int32)
        starts = jnp.concatenate([ends + first for first in firsts])
        return attention(shape, starts, q, k, v, None if ids[0] is None else ids)

    ids_BP = mask.ids_BP
    if mesh_axes is None:
        return local((0,), q_BHSP, k_BKSP, v_BKSP, ids_BP, ids_BP)
    exchange, way = divided(mesh_axes, k_BKSP.shape[1], q_BHSP.shape[3], mask.window)

    def run(q: Array, *arrays: Any) -> Array:
        on_device = functools.partial(local, exchange.firsts(way, q.shape[3]))
        return exchange.attend(on_device, way, 3, q, *arrays)

    rows, by_heads, sequence = (
        axes or None for axes in (mesh_axes.batch, mesh_axes.heads, mesh_axes.sequence)
    )
    by_head = PartitionSpec(rows, by_heads, None, sequence)
    of_ids = None if ids_BP is None else PartitionSpec(rows, sequence)
    return jax.shard_map(
        run, in_specs=(by_head, by_head, by_head, of_ids), out_specs=by_head, check_vma=False
    )(q_BHSP, k_BKSP, v_BKSP, ids_BP)
