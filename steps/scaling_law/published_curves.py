"""What others' runs with a training's optimizer came to with as many FLOPs."""

from __future__ import annotations

from typing import Any

from models.shape.config import TransformerConfig
from models.shape.footprint import training_flops_per_token
from pipeline.identity.fingerprint import canonical
from steps.measured import without
from steps.scaling_law.forecast import SCALED, SIZES
from training.config import OptimizerConfig, TrainConfig
from training.config.batch_schedule import rows_read
from training.recipes import marin_qwen3, nanochat
from training.recipes.curves import MARIN, NANOCHAT, Curve
from training.recipes.published import MARIN_SIZES

_OF_NET = (*SIZES, "vocab_size", "vocab_multiple", "window")


def published(
    model: TransformerConfig, optimizer: OptimizerConfig, train: TrainConfig
) -> tuple[Curve, float] | None:
    """The curve of runs with this optimizer but for its rates, and the FLOPs of the training.

    nanochat's is also of its net; Marin's net has other tables than a Llama, which it is used for.
    """
    own, theirs = _without_rates(optimizer), nanochat(12)
    nets = [without(canonical(each), _OF_NET) for each in (model, theirs.model)]
    if nets[0] == nets[1] and own == _without_rates(theirs.optimizer):
        curve = NANOCHAT
    elif any(own == _without_rates(marin_qwen3(size).optimizer) for size in MARIN_SIZES):
        curve = MARIN
    else:
        return None
    flops = training_flops_per_token(model, train.sequence_length, causal=False)
    return curve, rows_read(train, train.steps) * train.sequence_length * flops


def _without_rates(optimizer: OptimizerConfig) -> Any:
    return without(canonical(optimizer), SCALED)
