"""Tests of steps/pages."""
