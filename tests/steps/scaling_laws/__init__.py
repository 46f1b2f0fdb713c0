"""Tests of scaling laws."""
