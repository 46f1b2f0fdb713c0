"""Tests of pipeline/doctor."""
