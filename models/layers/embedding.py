"""Embedding lookup in tables that are sharded between steps.

The gradient of a lookup is a scatter-add into a table. By default the compiler all-reduces the
devices' whole tables; here they are reduce-scattered to what each device stores. With
`MeshAxes.split_tables` no device ever has a whole table: the ids of the devices that share one are
all-gathered, each looks up the ids that it stores, and a reduce-scatter returns the rows
(vocabulary parallelism, Shoeybi et al., 2019, arXiv:1909.08053, section 3).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AbstractMesh, PartitionSpec
from jax.typing import DTypeLike

from models.layers.axes import MeshAxes, TableSplit, sum_scatter


@dataclasses.dataclass(frozen=True)
class _Sharding:
    mesh: AbstractMesh
    rows: PartitionSpec  # of ids [batch, position]
    tokens: tuple[str, ...]
    table: TableSplit

    def map(
        self, run: Callable[..., Array], *arrays: Array, specs: Any, out: PartitionSpec
    ) -> Array:
        return jax.shard_map(
            run,
            mesh=self.mesh,
            in_specs=specs,
            out_specs=out,
            axis_names=set(self.tokens),
            check_vma=False,
        )(*arrays)


def look_up(table_VE: Array, ids_BP: Array, mesh_axes: MeshAxes | None) -> Array:
    """Rows [batch, position, embed] of a table [vocab, embed] for int32 ids in [0, V)."""
    table = TableSplit() if mesh_axes is None else mesh_axes.table_split(*table_VE.shape)
    if mesh_axes is None or not table.axes:
        return take_rows(table_VE, ids_BP)
    rows = PartitionSpec(mesh_axes.batch, mesh_axes.sequence or None)
    # Capture the mesh: the backward pass is traced when it is no longer set.
    sharding = _Sharding(jax.sharding.get_abstract_mesh(), rows, mesh_axes.tokens, table)
    if not table.stays:
        return _from_whole(sharding, table_VE, ids_BP)
    part = functools.partial(_from_part, table, table_VE.dtype)
    if table.wide:  # as is then the sum of the part's gradients over devices with the same part
        table_VE = table_VE.astype(jnp.float32)
    return sharding.map(part, table_VE, ids_BP, specs=(table.spec, rows), out=rows)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _from_part(split: TableSplit, dtype: DTypeLike, part_VE: Array, ids_BP: Array) -> Array:
    """Rows for this device's ids; devices along `split.axes` have a part of the table each.

    Each id belongs to one device; the others contribute zeros, so the sum is exact.
    """
    part = part_VE.astype(dtype)

    def rows(ids_BP: Array) -> Array:
        local = _local_ids(split, ids_BP, part)
        found = jnp.take(part, jnp.minimum(local, len(part) - 1), axis=0)
        found = jnp.where((local < len(part))[..., None], found, jnp.zeros((), dtype))
        return sum_scatter(found, split.axes, 0, wide=split.wide)

    found = jax.lax.map(rows, _parts(ids_BP, part)).swapaxes(0, 1)
    return found.reshape(len(ids_BP), -1, part.shape[1])[:, : ids_BP.shape[1]]


def _parts(array: Array, part_VE: Array) -> Array:
    """[batch, position, ...] -> [part, batch, position of a part, ...], the last filled with zeros.

    The rows that a group looks up at once are then at most half as many as those of its table.
    """
    batch, position, *rest = array.shape
    count = min(-(-2 * batch * position // len(part_VE)), position)  # both are a device's
    size = -(-position // count)
    padding = [(0, 0), (0, count * size - position), *[(0, 0)] * len(rest)]
    return jnp.pad(array, padding).reshape(batch, count, size, *rest).swapaxes(0, 1)


def _local_ids(split: TableSplit, ids_BP: Array, part_VE: Array) -> Array:
    """The group's ids as rows of this device's part; its length for those of other parts."""
    ids = jax.lax.all_gather(ids_BP, split.axes, axis=0, tiled=True)
    local = ids - jax.lax.axis_index(split.axes) * len(part_VE)
    return jnp.where((local >= 0) & (local < len(part_VE)), local, len(part_VE))


def _look_up_part(
    split: TableSplit, dtype: DTypeLike, part_VE: Array, ids_BP: Array
) -> tuple[Array, tuple[Array, Array]]:
    return _from_part(split, dtype, part_VE, ids_BP), (part_VE, ids_BP)


def _add_to_part(
    split: TableSplit, dtype: DTypeLike, residuals: tuple[Array, Array], rows_bar: Array
) -> tuple[Array, None]:
    part_VE, ids_BP = residuals  # only the part's shape and dtype are used

    def add(total: Array, one: tuple[Array, Array]) -> tuple[Array, None]:
        ids_BP, rows_bar = one
        bar = jax.lax.all_gather(rows_bar, split.axes, axis=0, tiled=True)
        local = _local_ids(split, ids_BP, part_VE)
        mine = jnp.where((local < len(part_VE))[..., None], bar.astype(jnp.float32), 0.0)
        return total.at[jnp.minimum(local, len(part_VE) - 1)].add(mine), None

    zero = jnp.zeros(part_VE.shape, jnp.float32)
    parts = _parts(ids_BP, part_VE), _parts(rows_bar, part_VE)
    return jax.lax.scan(add, zero, parts)[0].astype(part_VE.dtype), None


_from_part.defvjp(_look_up_part, _add_to_part)


def take_rows(table_NE: Array, ids: Array) -> Array:
    """Rows [..., embed] of a table for ids [...] inside it; their gradients add up in float32."""
    return _from_whole(None, table_NE, ids)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _from_whole(sharding: _Sharding | None, table_NE: Array, ids: Array) -> Array:
    return jnp.take(table_NE, ids, axis=0)


def _take(
    sharding: _Sharding | None, table_NE: Array, ids: Array
) -> tuple[Array, tuple[Array, Array]]:
    return jnp.take(table_NE, ids, axis=0), (table_NE, ids)


def _add_rows(
    sharding: _Sharding | None, residuals: tuple[Array, Array], rows_bar: Array
) -> tuple[Array, None]:
    table_NE, ids = residuals  # only the table's shape is used

    def local(ids: Array, bar: Array) -> Array:
        zero = jnp.zeros(table_NE.shape, jnp.float32)
        whole = zero.at[ids].add(bar.astype(jnp.float32)).astype(bar.dtype)
        return whole if sharding is None else sharding.table.reduce(whole, sharding.tokens)

    if sharding is None:
        return local(ids, rows_bar), None
    specs, out = (sharding.rows, sharding.rows), sharding.table.spec
    return sharding.map(local, ids, rows_bar, specs=specs, out=out), None


_from_whole.defvjp(_take, _add_rows)
