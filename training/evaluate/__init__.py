"""Evaluates models: losses on held-out splits, tasks, and generated samples."""
