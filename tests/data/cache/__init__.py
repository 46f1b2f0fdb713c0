"""Tests of data/cache."""
