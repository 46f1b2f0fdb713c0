"""The configuration of a run: steps, batches, optimizer, parallelism. Imports no JAX."""

from training.config.optimizer import Group, OptimizerConfig
from training.config.parallelism import SPLIT_TABLES, AxisRules, Parallelism
from training.config.train import TrainConfig

__all__ = ["SPLIT_TABLES", "AxisRules", "Group", "OptimizerConfig", "Parallelism", "TrainConfig"]
