"""Tests of `data/prepare`."""
