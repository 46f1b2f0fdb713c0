"""Tests of data/chat."""
