"""Ids at rest: the token cache, every chunk checked when it is read."""
