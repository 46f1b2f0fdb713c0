"""Operation counts against published numbers, brute force and the compiler's own count."""

from __future__ import annotations

import dataclasses

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.shape import presets
from models.shape.config import TransformerConfig
from models.shape.footprint import footprint, training_flops_per_token
from models.transformer import Forward
from tests.models import small

V6E = 918e12
LLAMA_8B = TransformerConfig(
    **{"vocab_size": 128_256, "layers": 32, "embed": 4096, "heads": 32, "kv_heads": 8},
    **{"head_size": 128, "mlp": 14_336, "qk_norm": False, "tied": False},
)
LONG_NANOCHAT = dataclasses.replace(presets.nanochat_d16, window_pattern="L", window=None)


def ideal(config, length, causal, peak=V6E):
    """Tokens per second that a device trains on at an MFU of 1."""
    return peak / training_flops_per_token(config, length, causal)


def utilisation(config, length, rate, causal, peak=V6E):
    """MFU in percent of `rate` tokens per second and device."""
    return 100 * rate / ideal(config, length, causal, peak)


def test_llama_8b_costs_what_others_say():
    """57.91 GFLOP a token with full attention, 51.47 causal, at 8,192 tokens; published size."""
    assert training_flops_per_token(LLAMA_8B, 8192, causal=False) == pytest.approx(57.91e9, abs=5e6)
    assert training_flops_per_token(LLAMA_8B, 8192, causal=True) == pytest.approx(51.47e9, abs=5e6)
    assert LLAMA_8B.parameter_count == 8_030_261_248


def test_tpuchat_runs_at_its_published_utilisation():
    """Its ideal rates for 4 and 3 heads, and 434,932 tokens per second as it counted them."""
    config = presets.tpuchat_130m
    assert round(ideal(config, 2048, causal=False)) == 935_334
    three = dataclasses.replace(config, heads=3)
    assert int(ideal(three, 2048, causal=False)) == 1_013_278
    assert round(three.parameter_count, -5) == 159_400_000
    assert utilisation(config, 2048, 434_932, causal=False) == pytest.approx(46.50, abs=0.005)
    assert utilisation(config, 2048, 434_932, causal=True) == pytest.approx(41.7, abs=0.05)
    assert utilisation(three, 2048, 464_234, causal=False) == pytest.approx(45.8, abs=0.05)


@pytest.mark.parametrize(
    ("config", "batch", "chips", "seconds", "full", "causal"),
    [
        (presets.tomat_200m, 128, 16, 2.08, 8.7, 6.6),
        (presets.tomat_1b, 256, 32, 5.76, 12.9, 10.4),
    ],
)
def test_tomat_steps(config, batch, chips, seconds, full, causal):
    """Step seconds of the two runs as MFU in both conventions."""
    config = dataclasses.replace(config, vocab_size=18_570)
    rate = batch * 8192 / seconds / chips
    assert utilisation(config, 8192, rate, causal=False) == pytest.approx(full, abs=0.05)
    assert utilisation(config, 8192, rate, causal=True) == pytest.approx(causal, abs=0.05)


@pytest.mark.parametrize(
    ("rate", "full", "windows", "causal"), [(470e3, 61.8, 46.4, 41.2), (630e3, 82.9, 62.2, 55.3)]
)
def test_nanochat_at_16k(rate, full, windows, causal):
    """What 4 chips did, counted with whole rows, with its windows, and causally."""
    got = utilisation(LONG_NANOCHAT, 16_384, rate / 4, causal=False)
    assert got == pytest.approx(full, abs=0.06)
    got = utilisation(presets.nanochat_d16, 16_384, rate / 4, causal=False)
    assert got == pytest.approx(windows, abs=0.06)
    got = utilisation(LONG_NANOCHAT, 16_384, rate / 4, causal=True)
    assert got == pytest.approx(causal, abs=0.06)


@pytest.mark.slow
def test_the_full_count_is_what_the_compiler_counts():
    """XLA's count of an unrolled forward pass exceeds ours only by elementwise work."""
    config = small.config(layers=1, embed=64, head_size=32, mlp=256, vocab_size=512)
    model = small.init(config)
    tokens = small.named(small.tokens(4, 64, 512))
    lowered = jax.jit(lambda m, t: m.logits(t, forward=Forward(remat="none")).array).lower(
        model, tokens
    )
    counted = lowered.compile().cost_analysis()["flops"] / tokens.size
    ours = training_flops_per_token(config, 64, causal=False) / 3
    assert ours < counted < 1.1 * ours


def visible(length, window):
    """Pairs of a token and a position it sees, one by one."""
    limit = length if window is None else window
    return sum(i - j < limit for i in range(length) for j in range(i + 1))


@given(
    length=st.integers(1, 40),
    pattern=st.sampled_from(["L", "S", "SL", "SSSL"]),
    window=st.integers(1, 50),
    layers=st.integers(1, 9),
)
def test_windows_are_counted_by_layer(length, pattern, window, layers):
    """Attention costs 4 operations per visible pair, head and feature, layer by layer."""
    window = window if "S" in pattern else None
    config = small.config(layers=layers, window_pattern=pattern, window=window)
    features = config.heads * config.head_size
    letters = (pattern * layers)[: layers - 1] + ("L" if "L" in pattern else "S")
    each = [window if letter == "S" else None for letter in letters]
    matmuls = 2 * config.matmul_parameters * length
    for causal in (True, False):
        if causal:
            pairs = sum(visible(length, one) for one in each)
        else:
            pairs = sum(length * min(length, one or length) for one in each)
        got = training_flops_per_token(config, length, causal) * length / 3
        assert got == pytest.approx(matmuls + 4 * features * pairs, rel=1e-12)


def test_tables_are_no_parameters_without_embeddings():
    """Embedding, head and learned positions are left out, norms and biases are not."""
    shape = small.config(tied=False, positions="learned", context=10, biases=True)
    left_out = shape.parameter_count - footprint(shape).without_embeddings
    assert left_out == 2 * 61 * 24 + 10 * 24


def test_gates_are_matmuls_and_tables_of_values_are_not():
    """Three of five layers have 61 rows of two heads of 8, and a gate of 12 numbers per head."""
    plain = small.config(layers=5, tied=False)
    shape = dataclasses.replace(plain, value_embeddings="alternate")
    assert shape.value_layers == (True, False, True, False, True)
    assert shape.matmul_parameters - plain.matmul_parameters == 3 * 12 * 2
    found, without = footprint(shape), footprint(plain)
    assert found.table_parameters - without.table_parameters == 3 * 61 * 2 * 8
    assert found.without_embeddings - without.without_embeddings == 3 * 12 * 2
    # Muon's share: its matrices have the axis "embed", which a gate's 12 features are not.
    assert found.block_parameters == without.block_parameters
    assert (found.period, found.cycles) == (2, 2)
