"""Named model shapes.

`llama_200m` is the size class of the main experiment. Heads are 128 wide because the TPU's matrix
unit is 256 x 256 (v6e): a head of 64 fills at most a quarter of it, one of 128 half.

The others are shapes of published models, for comparison. Each docstring names what is left out of
the published model; the parameter counts are exact.
"""

from __future__ import annotations

from models.shape.config import RopeScaling, TransformerConfig

llama_200m = TransformerConfig(
    vocab_size=32_768, layers=12, embed=1024, heads=8, kv_heads=4, head_size=128, mlp=3584
)
"""203,452,416 parameters (33,554,432 of them in the tied embedding), 203,423,744 in matmuls."""

tiny = TransformerConfig(
    vocab_size=2_048, layers=4, embed=128, heads=4, kv_heads=2, head_size=32, mlp=384
)
"""1,049,984 parameters, 1,048,576 in matmuls: trains in minutes on two CPU cores."""

tpuchat_130m = TransformerConfig(
    vocab_size=32_768,
    layers=8,
    embed=1024,
    heads=4,
    kv_heads=1,
    head_size=256,
    mlp=3072,
    norm="plain_rms",
    tied=False,
    logit_soft_cap=15.0,
    zero_outputs=True,
)
"""163,577,856 parameters, 130,023,424 in matmuls: tpuchat, named after the second number.

Published with sequences of 2,048. The published initialization differs: a uniform distribution for
the blocks' matrices, standard deviation 1 for the embedding and 0.001 for the head.
"""

llama_3_2_1b = TransformerConfig(
    vocab_size=128_256,
    layers=16,
    embed=2048,
    heads=32,
    kv_heads=8,
    head_size=64,
    mlp=8192,
    qk_norm=False,
    rope_base=500_000.0,
    rope_scaling=RopeScaling(factor=32.0),
    norm_epsilon=1e-5,
)
"""1,235,814,400 parameters, 1,235,746,816 in matmuls: Llama 3.2 1B, which nanoPT trains."""

nanochat_d16 = TransformerConfig(
    vocab_size=65_536,
    layers=16,
    embed=1024,
    heads=8,
    kv_heads=8,
    head_size=128,
    mlp=4096,
    mlp_kind="relu2",
    norm="plain_rms",
    tied=False,
    window_pattern="SSSL",
    window=8192,
    logit_soft_cap=15.0,
    zero_outputs=True,
)
"""335,544,320 parameters, 268,435,456 in matmuls: nanochat of depth 16 with sequences of 16,384.

An S layer attends to half a sequence. Value embeddings, per-layer scalars and the norm right after
the embedding are left out.
"""

tomat_200m = TransformerConfig(
    vocab_size=7168, layers=12, embed=1024, heads=16, kv_heads=16, head_size=64, mlp=4096
)
"""208,693,760 parameters, 208,666,624 in matmuls: tomat's 200M.

Its heads of 64 fill a quarter of the matrix unit. The published vocabularies have 6,792 and 18,570
ids.
"""

tomat_1b = TransformerConfig(
    vocab_size=14_336, layers=20, embed=2048, heads=16, kv_heads=16, head_size=128, mlp=5632
)
"""1,057,053,696 parameters, 1,056,964,608 in matmuls: tomat's 1B; vocabularies as for the 200M."""

bytes_tiny = TransformerConfig(
    vocab_size=257,
    layers=4,
    embed=32,
    heads=4,
    kv_heads=4,
    head_size=8,
    mlp=64,
    mlp_kind="relu",
    norm="layer",
    biases=True,
    positions="learned",
    context=128,
    qk_norm=False,
    tied=False,
    norm_epsilon=1e-5,
)
"""54,784 parameters, 40,992 in matmuls: bitesizedGPT's shape, a byte-level model for the tutorial.

The published model has 42,048: 128 ids (ASCII) instead of all bytes and EOS, no output projection
after attention, no biases in attention, a bias in the head; every block adds its own input twice.
"""
