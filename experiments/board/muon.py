"""Muon for matrices and AdamW for the rest, one rate for all: what `nanochat_16k` had."""

from experiments.board import Entry
from training.config import OptimizerConfig

OPTIMIZER = OptimizerConfig(
    kind="muon", learning_rate=2e-2, schedule="wsd", warmup=0.05, decay=0.4, min_ratio=0.0
)
ENTRY = Entry(optimizer=OPTIMIZER, public_steps=3_600)  # row 1, the first and untuned one
