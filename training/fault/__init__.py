"""Unresponsive processes and preemption."""
