"""Muon with a rate for each role: the ratios of row 36 of track 3."""

from experiments.board import Entry
from training.config import Group, OptimizerConfig

OPTIMIZER = OptimizerConfig(
    kind="muon",
    learning_rate=0.03,  # vectors
    schedule="wsd",
    warmup=0.0,
    decay=0.7,
    min_ratio=0.0,
    beta1=0.8,
    beta2=0.95,
    epsilon=1e-10,
    weight_decay=0.05,
    muon_rms=None,
    matrices=Group(learning_rate=0.05),
    embedding=Group(learning_rate=1.4, weight_decay=0.001),
    head=Group(learning_rate=0.008, weight_decay=0.001),
)
START = {"embedding_std": 1.0, "head_std": 0.001}
ENTRY = Entry(optimizer=OPTIMIZER, model=START, public_steps=3_250)  # row 36
