"""Tests of `data`, file by file."""
