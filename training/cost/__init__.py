"""What a program needs: memory, FLOPs, and shapes that waste the chip."""
