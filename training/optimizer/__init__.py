"""Optimizers and learning rates by their configuration."""
