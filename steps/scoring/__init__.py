"""Scoring of checkpoints, for `evaluate` and `follow`."""
