"""The experiments: one file each, with a function that declares a graph of steps."""
