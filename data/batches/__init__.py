"""Sequences in their shuffled order, and batches of them."""
