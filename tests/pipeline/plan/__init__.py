"""Tests of pipeline/plan."""
