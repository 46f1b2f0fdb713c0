"""The embedding's lookup on tables that are divided over devices between steps.

The gradient of a lookup is a scatter-add into a table. Left to the compiler, each device adds its
rows to a whole table and all tables are all-reduced. Here they are reduce-scattered: a device
receives the rows that it keeps. With `MeshAxes.split_tables` no device ever has a whole table: the
ids of the devices that share one are gathered, each looks up those it has, and the found rows are
scattered back to the devices that asked (vocabulary parallelism, Shoeybi et al., 2019,
arXiv:1909.08053, section 3).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AbstractMesh, PartitionSpec

from models.mesh_axes import MeshAxes, TableSplit


@dataclasses.dataclass(frozen=True)
class _Spread:
    """Over which mesh axes ids [batch, position] and a table are divided."""

    mesh: AbstractMesh
    rows: PartitionSpec
    tokens: tuple[str, ...]
    table: TableSplit

    def map(self, run: Any, *arrays: Array, specs: Any, out: PartitionSpec) -> Array:
        """`run` on every device's part of `arrays`."""
        return jax.shard_map(
            run,
            mesh=self.mesh,
            in_specs=specs,
            out_specs=out,
            axis_names=set(self.tokens),
            check_vma=False,
        )(*arrays)


def look_up(table_VE: Array, ids_BP: Array, mesh_axes: MeshAxes | None) -> Array:
    """Rows [batch, position, embed] of a table [vocab, embed] for int32 ids [batch, position].

    Args:
        table_VE: any float dtype.
        ids_BP: in [0, V).
        mesh_axes: what divides batch, position and the table, or None on one device.
    """
    table = TableSplit() if mesh_axes is None else mesh_axes.table_split(*table_VE.shape)
    if mesh_axes is None or not table.axes:
        return jnp.take(table_VE, ids_BP, axis=0)
    rows = PartitionSpec(mesh_axes.batch, mesh_axes.sequence or None)
    # The backward pass is traced where this mesh is no longer set.
    spread = _Spread(jax.sharding.get_abstract_mesh(), rows, mesh_axes.tokens, table)
    if not table.stays:
        return _from_whole(spread, table_VE, ids_BP)
    part = functools.partial(_from_part, table.axes)
    return spread.map(part, table_VE, ids_BP, specs=(table.spec, rows), out=rows)


def _from_part(tables: tuple[str, ...], part_VE: Array, ids_BP: Array) -> Array:
    """Rows for this device's ids, when each device of `tables` has a part of the table."""
    ids = jax.lax.all_gather(ids_BP, tables, axis=0, tiled=True)
    local = ids - jax.lax.axis_index(tables) * part_VE.shape[0]
    here = (local >= 0) & (local < part_VE.shape[0])
    found = jnp.take(part_VE, jnp.where(here, local, 0), axis=0)
    found = jnp.where(here[..., None], found, jnp.zeros((), found.dtype))
    return jax.lax.psum_scatter(found, tables, scatter_dimension=0, tiled=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _from_whole(spread: _Spread, table_VE: Array, ids_BP: Array) -> Array:
    return jnp.take(table_VE, ids_BP, axis=0)


def _forward(spread: _Spread, table_VE: Array, ids_BP: Array) -> tuple[Array, tuple[Array, Array]]:
    # Of the table only the shape is used.
    return jnp.take(table_VE, ids_BP, axis=0), (table_VE, ids_BP)


def _backward(
    spread: _Spread, residuals: tuple[Array, Array], rows_bar: Array
) -> tuple[Array, None]:
    table_VE, ids_BP = residuals

    def local(ids: Array, bar: Array) -> Array:
        whole = jnp.zeros(table_VE.shape, bar.dtype).at[ids].add(bar)
        return spread.table.reduce(whole, spread.tokens)

    specs, out = (spread.rows, spread.rows), spread.table.spec
    return spread.map(local, ids_BP, rows_bar, specs=specs, out=out), None


_from_whole.defvjp(_forward, _backward)
