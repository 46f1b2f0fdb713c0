"""Tests of pipeline/pages."""
