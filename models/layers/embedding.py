"""Embedding lookup in tables that are sharded between steps.

The gradient of a lookup is a scatter-add into a table. By default the compiler lets each device add
its rows to a whole table and all-reduces the tables. Here they are reduce-scattered: a device
receives only the part of the table that it stores. With `MeshAxes.split_tables` no device ever has
a whole table: the ids of the devices that share a table are all-gathered, each device looks up the
ids that it stores, and a reduce-scatter returns the rows (vocabulary parallelism, Shoeybi et al.,
2019, arXiv:1909.08053, section 3).
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

from models.layers.axes import MeshAxes, TableSplit


@dataclasses.dataclass(frozen=True)
class _Sharding:
    """The sharding of ids [batch, position] and of a table."""

    mesh: AbstractMesh
    rows: PartitionSpec
    tokens: tuple[str, ...]
    table: TableSplit

    def map(
        self, run: Callable[..., Array], *arrays: Array, specs: Any, out: PartitionSpec
    ) -> Array:
        """`run` on every device's shard of `arrays`."""
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
        return jnp.take(table_VE, ids_BP, axis=0)
    rows = PartitionSpec(mesh_axes.batch, mesh_axes.sequence or None)
    # Capture the mesh: the backward pass is traced when it is no longer set.
    sharding = _Sharding(jax.sharding.get_abstract_mesh(), rows, mesh_axes.tokens, table)
    if not table.stays:
        return _from_whole(sharding, table_VE, ids_BP)
    part = functools.partial(_from_part, table.axes)
    return sharding.map(part, table_VE, ids_BP, specs=(table.spec, rows), out=rows)


def _from_part(tables: tuple[str, ...], part_VE: Array, ids_BP: Array) -> Array:
    """Rows for this device's ids, where each device along `tables` has a part of the table.

    Each id belongs to one device; the others contribute zeros, so the sum is exact.
    """
    ids = jax.lax.all_gather(ids_BP, tables, axis=0, tiled=True)
    local = ids - jax.lax.axis_index(tables) * part_VE.shape[0]
    present = (local >= 0) & (local < part_VE.shape[0])
    found = jnp.take(part_VE, jnp.where(present, local, 0), axis=0)
    found = jnp.where(present[..., None], found, jnp.zeros((), found.dtype))
    return jax.lax.psum_scatter(found, tables, scatter_dimension=0, tiled=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _from_whole(sharding: _Sharding, table_VE: Array, ids_BP: Array) -> Array:
    return jnp.take(table_VE, ids_BP, axis=0)


def _forward(
    sharding: _Sharding, table_VE: Array, ids_BP: Array
) -> tuple[Array, tuple[Array, Array]]:
    # The backward pass uses only the shape of the table.
    return jnp.take(table_VE, ids_BP, axis=0), (table_VE, ids_BP)


def _backward(
    sharding: _Sharding, residuals: tuple[Array, Array], rows_bar: Array
) -> tuple[Array, None]:
    table_VE, ids_BP = residuals

    def local(ids: Array, bar: Array) -> Array:
        whole = jnp.zeros(table_VE.shape, bar.dtype).at[ids].add(bar)
        return sharding.table.reduce(whole, sharding.tokens)

    specs, out = (sharding.rows, sharding.rows), sharding.table.spec
    return sharding.map(local, ids_BP, rows_bar, specs=specs, out=out), None


_from_whole.defvjp(_forward, _backward)
