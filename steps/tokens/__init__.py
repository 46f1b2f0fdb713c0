"""Tokenizers and token caches."""
