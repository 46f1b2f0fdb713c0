"""Tests of training/fault."""
