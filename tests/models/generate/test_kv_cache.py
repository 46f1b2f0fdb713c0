"""One position at a time against all at once: the same logits, for every shape of model."""

from __future__ import annotations

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import models.named as hax
from models.generate.kv_cache import attend_to_past, decode, prefill
from models.layers.norms import cast
from models.layers.scan_layers import split_layers
from models.shape.config import TransformerConfig
from tests.models import reference, small

LENGTHS = (5, 1, 9)
SLOTS = 12


@eqx.filter_jit
def all_at_once(model, tokens):
    return model.logits(small.named(tokens)).array


@eqx.filter_jit
def prompts(model, tokens):
    hidden, cache = prefill(model, small.named(tokens), positions=SLOTS)
    logits = model.logits_of(hidden).rearrange(("batch", "position", "vocab"))
    return logits.array, cache


@eqx.filter_jit
def one_more(model, tokens, positions, cache, split=True):
    blocks = split_layers(model.blocks.stacked) if split else None
    hidden, cache = decode(model, blocks, tokens, positions, cache)
    return model.logits_of(hidden).rearrange(("batch", "vocab")).array, cache


def step_by_step(model, tokens: np.ndarray, split=True) -> np.ndarray:
    """Logits at every position: of prompts of `LENGTHS` in one pass, then one by one."""
    longest = max(LENGTHS)
    padding = np.arange(tokens.size).reshape(tokens.shape) % 61
    inside = np.arange(longest) < np.array(LENGTHS)[:, None]
    logits, cache = prompts(model, np.where(inside, tokens[:, :longest], padding[:, :longest]))
    found = np.full((*tokens.shape, logits.shape[-1]), np.nan)
    found[:, :longest][inside] = np.asarray(logits, np.float64)[inside]
    at = np.array(LENGTHS, np.int32)
    rows = np.arange(len(at))
    while (at < tokens.shape[1]).any():
        # A row that is through goes over its last position again.
        at = np.minimum(at, tokens.shape[1] - 1)
        logits, cache = one_more(model, tokens[rows, at], at, cache, split)
        found[rows, at] = np.asarray(logits, np.float64)
        at = at + 1
    return found


# Those that differ in what a cache holds or what is looked up in it.
CACHED = (
    *("grouped", "multi_query", "soft_caps", "rope_scaling", "learned_positions", "biases"),
    *("all_short", "short_long", "three_short_one_long", "gpt2", "nanochat"),
    *("recipe", "last_layer_has_a_table"),
)
# Only of the parameters' first values.
INITIAL = {"init_scale", "mlp_init_scale", "embedding_std", "head_std", "zero_outputs"}


def test_every_field_of_a_model_is_among_the_cached_shapes():
    """A new field needs a shape where it matters, which decoding is then compared with."""
    shapes = [small.config(**small.VARIANTS[name]) for name in CACHED]
    fields = {field.name: field.default for field in dataclasses.fields(TransformerConfig)}
    same = {
        name
        for name, default in fields.items()
        if all(getattr(shape, name) == default for shape in shapes)
    }
    assert same == INITIAL


@pytest.mark.slow
@pytest.mark.parametrize("name", CACHED)
def test_every_position_has_the_logits_of_the_whole_row(name):
    """Rows of different lengths, padded with ids that mean nothing; float32 to 1e-5 of NumPy's."""
    model = small.model(**small.VARIANTS[name])
    tokens = small.tokens(batch=3, position=SLOTS)
    assert small.relative(step_by_step(model, tokens), reference.logits(model, tokens)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["grouped", "short_long", "three_short_one_long", "gpt2", "recipe"]
)
def test_layers_that_stay_stacked_give_the_same_logits(name):
    """As on accelerators, which then hold the model once; with layers behind the last cycle too."""
    model = small.model(**small.VARIANTS[name])
    tokens = small.tokens(batch=3, position=SLOTS)
    got = step_by_step(model, tokens, split=False)
    assert small.relative(got, step_by_step(model, tokens)) < 1e-5


@pytest.mark.slow
def test_bfloat16():
    """Within the rounding of bfloat16, and the cache has that dtype."""
    model = cast(small.model(), jnp.bfloat16)
    tokens = small.tokens(batch=3, position=SLOTS)
    assert small.relative(step_by_step(model, tokens), all_at_once(model, tokens)) < 0.03
    cache = prompts(model, tokens)[1]
    assert {array.dtype for array in jax.tree.leaves(cache)} == {jnp.dtype(jnp.bfloat16)}


@settings(max_examples=20)
@given(
    window=st.sampled_from([None, 1, 3, 9]),
    soft_cap=st.sampled_from([None, 0.7]),
    positions=st.tuples(st.integers(0, 7), st.integers(0, 7)),
)
@pytest.mark.slow
def test_attention_to_the_past(window, soft_cap, positions):
    """Position by position in NumPy; what is in later slots, huge numbers too, changes nothing."""
    rng = np.random.default_rng(0)
    kv, group, size, slots = 2, 3, 4, 8
    q = rng.normal(size=(2, kv, group, size)).astype(np.float32)
    k, v = (rng.normal(size=(2, kv, size)).astype(np.float32) for _ in range(2))
    past = [rng.normal(size=(2, kv, slots, size)).astype(np.float32) for _ in range(2)]
    want = np.zeros_like(q, dtype=np.float64)
    for row, here in enumerate(positions):
        for head in range(kv):
            keys = np.concatenate([past[0][row, head, :here], k[row, head][None]])
            values = np.concatenate([past[1][row, head, :here], v[row, head][None]])
            for member in range(group):
                # The oracle divides queries by the root of their size; ours come scaled.
                queries = np.zeros((here + 1, size))
                queries[-1] = q[row, head, member] * np.sqrt(size)
                ids = np.zeros(here + 1)
                mixed = reference.attention_head(queries, keys, values, ids, soft_cap, window)
                want[row, head, member] = mixed[-1]
        for array in past:
            array[row, :, here:] = 1e9
    got = attend_to_past(
        hax.named(jnp.asarray(q), ("batch", "kv_heads", "q_per_kv", "head_size")),
        *(hax.named(jnp.asarray(x), ("batch", "kv_heads", "head_size")) for x in (k, v)),
        **{
            name: hax.named(jnp.asarray(x), ("batch", "kv_heads", "position", "head_size"))
            for name, x in zip(("past_keys", "past_values"), past, strict=True)
        },
        positions=jnp.asarray(positions, jnp.int32),
        window=window,
        soft_cap=soft_cap,
    )
    assert small.relative(got.array, want) < 1e-5
