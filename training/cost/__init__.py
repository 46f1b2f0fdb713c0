"""Cost of a program: memory, FLOPs, time, and shapes that waste the chip."""
