"""Metrics for services, none of which may hold up the run."""
