"""Digests, and what they are taken of: keys, recipes, builds, contents, source code."""
