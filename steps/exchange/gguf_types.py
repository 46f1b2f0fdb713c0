"""The types of numbers in a GGUF file. Imports nothing, because declarations of graphs read it."""

TYPES = ("f16", "bf16", "q8_0", "f32")
"""llama.cpp's names; q8_0 has blocks of 32 integers of 8 bits with one scale per block."""
