"""Runs programs that a model generates in a sandbox, and counts the ones that pass."""
