"""Scores of a model: losses on splits, tasks, and generated samples."""
