"""Tests of training/optimizer."""
