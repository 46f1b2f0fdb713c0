"""The compiled train step: its state, its masks, its program for a set of devices."""
