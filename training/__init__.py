"""Training: configuration, compiled step, checkpoints, evaluation, metrics, and the loop."""
