"""Digests of keys, actions, builds, contents and source code."""
