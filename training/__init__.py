"""The training loop: state, optimizer, sharding, checkpoints, metrics, resume."""
