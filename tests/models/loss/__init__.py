"""Tests of models/loss."""
