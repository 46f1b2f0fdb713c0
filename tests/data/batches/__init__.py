"""Tests of data/batches."""
