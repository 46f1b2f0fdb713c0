"""What must not change by accident: files the tests compare with, and how to write them anew."""
