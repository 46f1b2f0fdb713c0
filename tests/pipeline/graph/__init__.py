"""Tests of pipeline/graph."""
