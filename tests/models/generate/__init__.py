"""Tests of models/generate."""
