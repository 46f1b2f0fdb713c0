"""Digests of keys, recipes, builds, contents and source code."""
