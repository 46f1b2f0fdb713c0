"""Tests of data/select."""
