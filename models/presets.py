"""Named model shapes.

`llama_200m` is the size class of the main experiment. Heads are 128 wide because the TPU's matrix
unit is 256 x 256 (v6e): a head of 64 fills at most a quarter of it, one of 128 half.
"""

from __future__ import annotations

from models.config import TransformerConfig

llama_200m = TransformerConfig(
    vocab_size=32_768,
    layers=12,
    embed=1024,
    heads=8,
    kv_heads=4,
    head_size=128,
    mlp=3584,
)
"""203,452,416 parameters (33,554,432 of them in the tied embedding), 203,423,744 in matmuls."""

tiny = TransformerConfig(
    vocab_size=2_048,
    layers=4,
    embed=128,
    heads=4,
    kv_heads=2,
    head_size=32,
    mlp=384,
)
"""1,049,984 parameters: minutes of training on two CPU cores."""
