"""Tests of training/recipes."""
