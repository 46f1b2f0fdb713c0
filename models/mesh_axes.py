"""Names of the mesh axes that divide activations, for the code that is written per device.

Most of the model is partitioned by the compiler from axis names alone. Three parts are not:
kernels, which the compiler cannot partition; the loss, whose sum over chunks it would reduce over
the devices once a chunk instead of once; and the embedding's gradient, which it would all-reduce
whole. They run in `jax.shard_map` over the mesh that JAX has while the program is traced
(`jax.set_mesh`, or `jax.sharding.use_abstract_mesh` where no device is there).
"""

from __future__ import annotations

import dataclasses
import math

import jax
from jax import Array
from jax.sharding import PartitionSpec


@dataclasses.dataclass(frozen=True)
class TableSplit:
    """How a table [vocab, embed] is divided over devices that have different rows of the batch.

    Attributes:
        axes: mesh axes; none when every device has it whole between steps too.
        dimension: of the table that they divide.
        stays: whether it is divided also where it is multiplied, by ids then.
    """

    axes: tuple[str, ...] = ()
    dimension: int = 0
    stays: bool = False

    @property
    def spec(self) -> PartitionSpec:
        """Of the table, and of its gradient."""
        return PartitionSpec(*(None,) * self.dimension, self.axes) if self.axes else PartitionSpec()

    def reduce(self, table_VE: Array, tokens: tuple[str, ...]) -> Array:
        """Sum of the devices' gradients of a table; each device keeps its part of the sum.

        Args:
            table_VE: a device's own sum, whole.
            tokens: mesh axes over which to add, `axes` among them.
        """
        if self.axes:
            table_VE = jax.lax.psum_scatter(
                table_VE, self.axes, scatter_dimension=self.dimension, tiled=True
            )
        others = tuple(name for name in tokens if name not in self.axes)
        return jax.lax.psum(table_VE, others) if others else table_VE


@dataclasses.dataclass(frozen=True)
class MeshAxes:
    """What is spread over which axes of the mesh.

    Attributes:
        batch: mesh axes that divide "batch".
        heads: mesh axes that divide "kv_heads" (and the MLP and the vocabulary).
        sequence: mesh axes that divide "position".
        tables: of the axes in `batch`, those that divide embedding and head between steps: by ids,
            or along "embed" where ids are divided by `heads` or not divisible.
        split_tables: whether tables divided by ids stay so where they are multiplied, and the rows
            of the devices that share them are gathered instead.
    """

    batch: tuple[str, ...]
    heads: tuple[str, ...] = ()
    sequence: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()
    split_tables: bool = False

    @property
    def tokens(self) -> tuple[str, ...]:
        """Mesh axes that divide batch or position."""
        return (*self.batch, *self.sequence)

    def shards(self, axes: tuple[str, ...]) -> int:
        """Into how many pieces `axes` of the mesh divide something.

        Raises:
            KeyError: no mesh is set that has these axes.
        """
        shape = jax.sharding.get_abstract_mesh().shape
        return math.prod(shape[name] for name in axes)

    def table_split(self, vocab: int, embed: int) -> TableSplit:
        """How a table [vocab, embed] is divided between steps."""
        devices = self.shards(self.tables)
        if devices == 1:
            return TableSplit()
        if not self.heads and vocab % devices == 0:
            return TableSplit(self.tables, 0, self.split_tables)
        return TableSplit(self.tables, 1) if embed % devices == 0 else TableSplit()
