"""Tests of models/layers."""
