"""The configuration of a run: steps, batches, optimizer, parallelism. Imports no JAX."""

from training.config.axis_rules import SPLIT_TABLES, AxisRules
from training.config.optimizer import OptimizerConfig
from training.config.parallelism import Parallelism
from training.config.train import TrainConfig

__all__ = ["SPLIT_TABLES", "AxisRules", "OptimizerConfig", "Parallelism", "TrainConfig"]
