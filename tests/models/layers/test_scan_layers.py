"""The scan over layers: cycles, unrolling, and that it is a plain loop over blocks."""

from __future__ import annotations

import equinox as eqx
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import models.named as hax
from models.layers.scan_layers import apply_layers
from models.shape.config import TransformerConfig
from models.shape.footprint import cycles_of
from models.transformer import Forward
from tests.models import reference, small

logits_of = eqx.filter_jit(lambda model, tokens, **options: model.logits(tokens, **options).array)


@given(st.lists(st.sampled_from([None, 4]), min_size=1, max_size=12))
def test_the_program_has_as_few_blocks_as_any_cycle_leaves(kinds):
    """Brute force over every prefix that is repeated, and every number of times it is."""
    period, count = cycles_of(kinds)
    assert kinds[: period * count] == kinds[:period] * count
    blocks = [
        n + len(kinds) - n * times
        for n in range(1, len(kinds) + 1)
        for times in range(1, len(kinds) // n + 1)
        if kinds[:n] * times == kinds[: n * times]
    ]
    assert period + len(kinds) - period * count == min(blocks)


@given(
    pattern=st.text("LS", min_size=1, max_size=5), layers=st.integers(1, 13), window=st.integers(1)
)
def test_windows_repeat_the_pattern(pattern, layers, window):
    """One letter a layer, in turn; the last layer sees everything if any does."""
    window = window if "S" in pattern else None
    config = small.config(layers=layers, window_pattern=pattern, window=window)
    assert list(config.windows) == reference.layer_windows(config)
    assert len(config.windows) == layers


@pytest.mark.slow
@settings(max_examples=15)
@given(data=st.data())
def test_layers_are_applied_in_order(data):
    """apply_layers is a loop: carry = apply(layer i, carry, kind i), for any unrolling.

    Layers of kind 2 have a number of their own, in an array of theirs alone.
    """
    count = data.draw(st.integers(1, 8))
    kinds = data.draw(st.lists(st.sampled_from([1, 2]), min_size=count, max_size=count))
    unroll = data.draw(st.integers(1, count))
    weights = np.random.default_rng(0).normal(size=(3, count)).astype(np.float32)
    owners = [kind == 2 for kind in kinds]
    stacked = {"w": hax.named(jax.numpy.asarray(weights), ("embed", "layers"))}
    if any(owners):
        stacked["own"] = hax.named(jax.numpy.arange(sum(owners), dtype="float32") * 0.1, "layers")

    def apply(block, x, kind):
        assert (block.get("own") is not None) == (kind == 2)
        return x * kind * 0.5 + block["w"] + (block["own"] if kind == 2 else 0.0)

    start = hax.named(jax.numpy.ones(3), "embed")
    got = apply_layers(stacked, start, apply, kinds, unroll=unroll, owners=owners)
    want = np.ones(3)
    for i, kind in enumerate(kinds):
        own = 0.1 * kinds[:i].count(2) if kind == 2 else 0.0
        want = want * kind * 0.5 + weights[:, i] + own
    np.testing.assert_allclose(got.array, want, rtol=1e-5, atol=1e-6)


def turns(config: TransformerConfig, unroll: int) -> list[int]:
    """Lengths of the layer loops in the traced program."""
    model = jax.eval_shape(lambda: small.init(config))
    rows = small.named(small.tokens())
    forward = Forward(unroll=unroll, remat="none")
    jaxpr = jax.make_jaxpr(lambda m: m.hidden(rows, forward=forward).array)(model)
    return [
        (eqn.params["length"], eqn.params["unroll"])
        for eqn in jaxpr.eqns
        if eqn.primitive.name == "scan"
    ]


@pytest.mark.slow
def test_the_program_scans_cycles():
    """Eight layers of SSSL are a loop of two turns; the unroll setting reaches it."""
    shape = small.config(layers=8, window_pattern="SSSL", window=3)
    assert turns(shape, 1) == [(2, 1)]
    assert turns(shape, 2) == [(2, 2)]
    assert turns(small.config(layers=6), 3) == [(6, 3)]


@pytest.mark.slow
def test_gather_is_applied_to_every_layer():
    """The hook sees each block before it is used and its result is what is used."""
    model, rows = small.model(), small.named(small.tokens())

    def halved(block):
        return jax.tree.map(lambda array: array * 0.5, block)

    gathered = logits_of(model, rows, forward=Forward(gather=halved))
    block = halved(model.blocks.stacked)
    direct = eqx.tree_at(lambda m: m.blocks.stacked, model, block)
    np.testing.assert_allclose(gathered, logits_of(direct, rows), atol=1e-6)
