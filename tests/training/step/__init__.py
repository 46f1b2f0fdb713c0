"""Tests of training/step."""
