"""Layers with named axes, and what is done around them."""
