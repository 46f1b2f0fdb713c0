"""Tests of training/checkpoint."""
