"""Tests of training/metrics/trackers."""
