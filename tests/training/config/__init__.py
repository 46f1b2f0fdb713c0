"""Tests of training/config."""
