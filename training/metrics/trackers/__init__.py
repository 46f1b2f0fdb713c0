"""Metrics trackers for external services, none of which can block the run."""
