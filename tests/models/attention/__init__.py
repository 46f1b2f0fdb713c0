"""Tests of models/attention."""
