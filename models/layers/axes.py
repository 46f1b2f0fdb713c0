"""The axis names of all named arrays in the project.

Parallelism is a mapping from these names to mesh axes: the names are the only interface between the
model and its sharding.

Query heads are two axes, `kv_heads` and `q_per_kv`, so that grouped-query attention contracts by
name without repeating keys or values. `heads` is these two flattened, `kv_heads` outermost;
`query_features` and `kv_features` are the features of all heads in one axis, the projections'
output.
"""

from __future__ import annotations

import dataclasses

from models.named import Axis
from models.shape.config import TransformerConfig

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

TOKENS_FIRST = (BATCH, POSITION, EMBED)
FEATURES_FIRST = (EMBED, BATCH, POSITION)
"""The two orders of the residual stream's axes, see `models.layers.matmul`."""


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
    """Axes of the parameters that `config` describes."""
    return ModelAxes(
        Vocab=Axis(VOCAB, config.padded_vocab_size),
        Layers=Axis(LAYERS, config.layers),
        Embed=Axis(EMBED, config.embed),
        KVHeads=Axis(KV_HEADS, config.kv_heads),
        QPerKV=Axis(Q_PER_KV, config.q_per_kv),
        HeadSize=Axis(HEAD_SIZE, config.head_size),
        Mlp=Axis(MLP, config.mlp),
    )
