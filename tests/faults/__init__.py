"""Faults on purpose: real kills of the real command."""
