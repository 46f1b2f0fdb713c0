"""Tests of steps/tokens."""
