"""How numbers of a GGUF file may be stored. Imports nothing: a plan reads it."""

TYPES = ("f16", "bf16", "q8_0", "f32")
"""Names of llama.cpp; q8_0 has blocks of 32 whole numbers of 8 bits with a scale each."""
