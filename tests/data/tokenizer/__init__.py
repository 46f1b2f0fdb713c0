"""Tests of data/tokenizer."""
