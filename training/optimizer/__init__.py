"""Optimizers and learning-rate schedules, built from their configuration."""
