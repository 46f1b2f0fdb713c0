"""Tests of models/, against NumPy and against each other."""
