"""Tests of training/cost."""
