"""Operation counts against published numbers and against the compiler's own count."""

from __future__ import annotations

import jax
import pytest

from models.config import TransformerConfig
from models.flops import forward_flops_per_token, peak_flops, training_flops_per_token
from tests.models import small

LLAMA_8B = TransformerConfig(
    vocab_size=128_256,
    layers=32,
    embed=4096,
    heads=32,
    kv_heads=8,
    head_size=128,
    mlp=14_336,
    qk_norm=False,
    tied=False,
)
TPUCHAT = TransformerConfig(
    vocab_size=32_768,
    layers=8,
    embed=1024,
    heads=4,
    kv_heads=1,
    head_size=256,
    mlp=3072,
    tied=False,
)


def test_llama_8b_costs_what_others_say():
    """57.91 GFLOP a token with full attention, 51.47 causal, at 8,192 tokens."""
    assert training_flops_per_token(LLAMA_8B, 8192, causal=False) == pytest.approx(57.91e9, abs=5e6)
    assert training_flops_per_token(LLAMA_8B, 8192, causal=True) == pytest.approx(51.47e9, abs=5e6)


def test_llama_8b_has_its_published_size():
    """8,030,261,248 parameters, as in the released checkpoint."""
    assert LLAMA_8B.parameter_count == 8_030_261_248


def test_tpuchat_has_its_published_size():
    """130,023,424 in matrix products; in all, ours has the weights of the norms more."""
    assert TPUCHAT.matmul_parameters == 130_023_424
    assert TPUCHAT.norm_parameters == 8 * (2 * 1024 + 2 * 256) + 1024
    assert TPUCHAT.parameter_count - TPUCHAT.norm_parameters == 163_577_856


def test_the_full_count_is_what_the_compiler_counts():
    """XLA's count of an unrolled forward pass exceeds ours only by elementwise work."""
    config = small.config(layers=1, embed=64, head_size=32, mlp=256, vocab_size=512)
    model = small.init(config)
    tokens = small.named(small.tokens(4, 64, 512))
    lowered = jax.jit(lambda m, t: m.logits(t, remat="none").array).lower(model, tokens)
    counted = lowered.compile().cost_analysis()["flops"] / tokens.size
    ours = forward_flops_per_token(config, 64, causal=False)
    assert ours < counted < 1.1 * ours


@pytest.mark.parametrize("length", [1, 2, 7, 64])
def test_causal_counts_the_positions_each_token_sees(length):
    """Summed over a row, attention costs 4 operations per visible pair, head and feature."""
    config = small.config()
    pairs = sum(len(range(position + 1)) for position in range(length))
    attention = 4 * pairs * config.heads * config.head_size * config.layers
    want = 2 * config.matmul_parameters * length + attention
    got = forward_flops_per_token(config, length, causal=True) * length
    assert got == pytest.approx(want, rel=1e-12)


def test_peaks():
    """Chips by JAX's name; anything else has no peak rather than a wrong one."""
    assert peak_flops("TPU v6 lite") == 918e12
    assert peak_flops("TPU v5 lite") == 197e12
    assert peak_flops("TPU v5") == peak_flops("TPU v5p") == 459e12
    assert peak_flops("TPU v4") == 275e12
    assert peak_flops("cpu") is None
