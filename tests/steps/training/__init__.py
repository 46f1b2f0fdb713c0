"""Tests of steps/training."""
