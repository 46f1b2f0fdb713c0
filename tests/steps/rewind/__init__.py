"""Tests of rewind: documents behind steps."""
