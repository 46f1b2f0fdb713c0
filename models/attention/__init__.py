"""Causal attention: one entry point, its back ends, and the choice of a back end."""
