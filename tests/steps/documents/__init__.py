"""Tests of steps/documents."""
