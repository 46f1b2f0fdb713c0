"""Checkpoints: written without stopping the devices, complete or invisible, checked when read."""
