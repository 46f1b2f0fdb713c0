"""Metrics for files and services, none of which may hold up the run."""
