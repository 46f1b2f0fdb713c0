"""Declaring a graph: steps, nodes, artifacts, hardware."""
