"""Tests of pipeline/execute."""
