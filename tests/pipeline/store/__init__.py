"""Tests of pipeline/store."""
