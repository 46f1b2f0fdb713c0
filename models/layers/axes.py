"""The axis names of all named arrays, and the mesh axes that divide them.

Parallelism is a mapping from these names to mesh axes: the names are the only interface between the
model and its sharding. Query heads are two axes, `kv_heads` and `q_per_kv`, so that grouped-query
attention contracts by name without repeating keys or values. `heads` is these two flattened,
`kv_heads` outermost; `query_features` and `kv_features` are the features of all heads in one axis.

Kernels, the loss and the embedding's gradient run in `jax.shard_map`, where the compiler would not
partition them, or would all-reduce too much; their mesh is the one set while they are traced.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from models.named import Axis
from models.shape.config import TransformerConfig


def sum_scatter(x: Array, axes: tuple[str, ...], dimension: int, *, wide: bool) -> Array:
    """`x` summed over `axes`, in float32 if `wide`; a device keeps its part along `dimension`."""
    summed = x.astype(jnp.float32) if wide else x
    summed = jax.lax.psum_scatter(summed, axes, scatter_dimension=dimension, tiled=True)
    return summed.astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class TableSplit:
    """The sharding of a table [vocab, embed] over devices with different sequences of the batch."""

    axes: tuple[str, ...] = ()  # empty when every device has the whole table between steps too
    dimension: int = 0  # which `axes` divide
    stays: bool = False  # divided, by ids, in the lookup and in the matmul of the loss
    wide: bool = False  # sums over devices are computed in float32

    @property
    def spec(self) -> PartitionSpec:
        return PartitionSpec(*(None,) * self.dimension, self.axes) if self.axes else PartitionSpec()

    def reduce(self, table_VE: Array, tokens: tuple[str, ...]) -> Array:
        """The sum over `tokens` of the devices' gradients of a whole table; each keeps its part."""
        dtype = table_VE.dtype
        if self.wide:
            table_VE = table_VE.astype(jnp.float32)
        if self.axes:
            table_VE = sum_scatter(table_VE, self.axes, self.dimension, wide=False)
        others = tuple(name for name in tokens if name not in self.axes)
        return (jax.lax.psum(table_VE, others) if others else table_VE).astype(dtype)


@dataclasses.dataclass(frozen=True)
class MeshAxes:
    """The mesh axes that divide each axis of the activations and tables.

    Attributes:
        tables: those axes of `batch` that divide embedding and head between steps: by ids, or along
            "embed" where `heads` divides the ids or the ids are not divisible.
        split_tables: whether tables divided by ids stay divided in the lookup and in the loss,
            where ids and hidden states are then all-gathered instead of the tables.
        wide_sums: whether gradients and rows of tables are summed over devices in float32.
    """

    batch: tuple[str, ...]
    heads: tuple[str, ...] = ()  # divide "kv_heads", the MLP and the vocabulary
    sequence: tuple[str, ...] = ()  # divide "position"
    tables: tuple[str, ...] = ()
    split_tables: bool = False
    wide_sums: bool = False

    @property
    def tokens(self) -> tuple[str, ...]:
        """Mesh axes that divide batch or position."""
        return (*self.batch, *self.sequence)

    def shards(self, axes: tuple[str, ...]) -> int:
        """The number of shards along `axes` of the current mesh; `KeyError` if it lacks one."""
        shape = jax.sharding.get_abstract_mesh().shape
        return math.prod(shape[name] for name in axes)

    def table_split(self, vocab: int, embed: int) -> TableSplit:
        """The sharding of a table [vocab, embed] between steps."""
        devices, whole = self.shards(self.tables), TableSplit(wide=self.wide_sums)
        if devices == 1:
            return whole
        if not self.heads and vocab % devices == 0:
            return TableSplit(self.tables, 0, self.split_tables, self.wide_sums)
        by_embed = TableSplit(self.tables, 1, wide=self.wide_sums)
        return by_embed if embed % devices == 0 else whole


BATCH = "batch"
POSITION = "position"
KEY_POSITION = "key_position"
EMBED = "embed"
HEADS = "heads"
KV_HEADS = "kv_heads"
Q_PER_KV = "q_per_kv"
HEAD_SIZE = "head_size"
QUERY_FEATURES = "query_features"
KV_FEATURES = "kv_features"
MLP = "mlp"
VOCAB = "vocab"
LAYERS = "layers"
GATE = "gate_inputs"

TOKENS_FIRST = (BATCH, POSITION, EMBED)
FEATURES_FIRST = (EMBED, BATCH, POSITION)
"""The two orders of the residual stream's axes, see `models.layers.linear`."""


@dataclasses.dataclass(frozen=True)
class ModelAxes:
    """The sized axes of one model's parameters."""

    Vocab: Axis
    Layers: Axis
    Embed: Axis
    KVHeads: Axis
    QPerKV: Axis
    HeadSize: Axis
    Mlp: Axis


def model_axes(config: TransformerConfig) -> ModelAxes:
    return ModelAxes(
        Vocab=Axis(VOCAB, config.padded_vocab_size),
        Layers=Axis(LAYERS, config.layers),
        Embed=Axis(EMBED, config.embed),
        KVHeads=Axis(KV_HEADS, config.kv_heads),
        QPerKV=Axis(Q_PER_KV, config.q_per_kv),
        HeadSize=Axis(HEAD_SIZE, config.head_size),
        Mlp=Axis(MLP, config.mlp),
    )
