"""What people run: one file per experiment, each a short graph of steps."""
