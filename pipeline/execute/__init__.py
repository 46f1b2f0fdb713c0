"""Executing a graph: attempts, the executor's loop, workers in this process and on Ray."""
