"""Tests of steps/checkpoints."""
