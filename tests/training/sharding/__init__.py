"""Tests of training/sharding."""
