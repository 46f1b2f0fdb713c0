"""Haliax modules with named axes: the transformer, its attention and loss, and what they cost."""
