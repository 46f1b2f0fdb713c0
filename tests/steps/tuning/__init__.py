"""Tests of steps/tuning."""
