"""AdamW, with a rate that stays at its peak and falls to zero over the last 40 %."""

from experiments.board import Entry
from training.config import OptimizerConfig

ENTRY = Entry(
    optimizer=OptimizerConfig(
        learning_rate=5e-3, schedule="wsd", warmup=0.05, decay=0.4, min_ratio=0.0
    ),
)
