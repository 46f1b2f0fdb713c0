"""Tests of steps/scaling_law."""
