"""A trained model out of a checkpoint, for evaluation and generation in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from models.config import TransformerConfig
from models.transformer import Transformer
from training.checkpoint_index import read_index
from training.mesh import Layout, make_layout
from training.restore import agreed, restore

_AVERAGE = "average."


def load_model(
    checkpoint_path: str, config: TransformerConfig, *, devices: Sequence[Any] | None = None
) -> Transformer:
    """The float32 model of a checkpoint; the optimizer's state is not read into memory.

    Of a run that keeps an average of its parameters (`TrainConfig.ema`) it is that average.

    Args:
        checkpoint_path: as `on_commit` and `TrainResult.checkpoint` give it.
        config: shape of the model that was trained.
        devices: to hold one copy each; default the first one.

    Raises:
        CorruptOutput: files are missing or changed.
        InputError: the checkpoint is of another model; names the array.
    """
    return load_model_onto(make_layout(devices or jax.devices()[:1]), checkpoint_path, config)


def load_model_onto(layout: Layout, checkpoint_path: str, config: TransformerConfig) -> Transformer:
    """The same on the devices of a mesh, in every one of its processes."""
    shapes = jax.eval_shape(lambda key: Transformer.init(config, key=key), jax.random.key(0))
    arrays = agreed(lambda: read_index(checkpoint_path))["leaves"]
    averaged = any(name.startswith(_AVERAGE) for name in arrays)
    return restore(
        checkpoint_path, layout.abstract(shapes), part=_AVERAGE if averaged else "model."
    )
