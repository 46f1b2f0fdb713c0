"""Tests of training/trainer."""
