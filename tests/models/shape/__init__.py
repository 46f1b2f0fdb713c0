"""Tests of models/shape."""
