"""Tests of steps/evaluation."""
