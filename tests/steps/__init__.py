"""Tests of the step library, through the experiment that uses it."""
