"""Tests of data/read."""
