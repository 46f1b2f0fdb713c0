"""Tests of training/evaluate."""
