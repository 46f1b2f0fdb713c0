"""Metrics rows, wall time, goodput, profiles and trackers."""
