"""Scoring checkpoints, for evaluate, follow and downstream tasks."""
