"""Causal attention: one call, its back ends, and the choice among them."""
