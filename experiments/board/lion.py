"""Lion (https://arxiv.org/abs/2302.06675), with the schedule of `adamw_wsd`."""

from experiments.board import Entry
from training.config import OptimizerConfig

ENTRY = Entry(
    optimizer=OptimizerConfig(
        kind="lion",
        learning_rate=4e-3,
        schedule="wsd",
        warmup=0.05,
        decay=0.4,
        min_ratio=0.0,
        weight_decay=0.5,
    ),
)
