"""Tests of models/hf."""
