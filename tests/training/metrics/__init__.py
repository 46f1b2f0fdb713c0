"""Tests of training/metrics."""
