"""Ladders of runs and the law fitted to them."""
