"""The loss in chunks of the vocabulary against NumPy, automatic differentiation and the other."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.loss import cross_entropy, vocab_chunks
from models.loss.vocab_chunks import sums_and_gradients, vocabulary_chunks
from models.mesh_axes import MeshAxes
from tests.models import small
from tests.models.loss.test_cross_entropy import inputs, numpy_sums, ours, plain

by_vocabulary = functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))(sums_and_gradients)


@pytest.mark.slow
@settings(max_examples=3)
@given(
    batch=st.sampled_from([1, 3]),
    position=st.sampled_from([1, 6]),
    vocab=st.sampled_from([(1, 1), (8, 4), (37, 37), (36, 3)]),
    cap=st.sampled_from([None, 0.5, 20.0]),
    z_loss=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 1000),
)
def test_sums_and_gradients_for_any_shape(batch, position, vocab, cap, z_loss, seed):
    """Sums are NumPy's and gradients those of the obvious formula, for every divisor tried."""
    size, chunks = vocab
    arrays = inputs(batch, position, size, seed=seed)
    sums, gradients = by_vocabulary(z_loss, cap, chunks, None, *arrays)
    np.testing.assert_allclose(sums, numpy_sums(*arrays, z_loss, cap), rtol=1e-5, atol=1e-4)
    want = jax.grad(plain, argnums=(0, 1))(*arrays, z_loss, cap)
    for got, expected in zip(gradients, want, strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-4, rtol=1e-4)


def test_large_scores_do_not_overflow():
    """Logits of some hundreds, the largest in a later chunk than the first."""
    hidden, head, targets, weights = inputs(2, 4, 8)
    head = head * 200
    sums, gradients = by_vocabulary(0.0, None, 4, None, hidden, head, targets, weights)
    want = numpy_sums(hidden, head, targets, weights, 0.0, None)
    np.testing.assert_allclose(sums, want, rtol=1e-5)
    assert all(np.isfinite(g).all() for g in gradients)


def test_a_cpu_takes_it_where_logits_need_chunks(monkeypatch):
    """Also divided over devices; the sums and gradients are those of chunks of positions."""
    arrays = inputs(8, 4, 64)
    want = ours(*arrays, 0.1, 1.5, 2)
    calls = []

    def counted(*settings):
        calls.append(settings[2])
        return sums_and_gradients(*settings)

    monkeypatch.setattr(cross_entropy, "sums_and_gradients", counted)
    monkeypatch.setattr(vocab_chunks, "CHUNK_BYTES", 128)
    monkeypatch.setattr(vocab_chunks, "LEAST_IDS", 8)
    with jax.set_mesh(small.mesh(data=8)):
        got = ours(*arrays, 0.1, 1.5, 2, MeshAxes(batch=("data",)), True)
    assert calls == [8]
    np.testing.assert_allclose(got[1], want[1], rtol=1e-5)
    assert small.relative(got[0], want[0]) < 1e-5


@given(st.integers(1, 100_000), st.integers(1, 100_000))
def test_chunks_fit_the_cache_and_are_not_too_small(vocab, tokens):
    """A divisor of the ids; none where only tiny chunks would do."""
    chunks = vocabulary_chunks(vocab, tokens)
    if chunks is None:
        divisors = [n for n in range(1, vocab // 256 + 1) if vocab % n == 0]
        assert all(vocab // n * tokens * 4 > 8 * 2**20 for n in divisors)
    else:
        assert vocab % chunks == 0
        assert vocab // chunks >= 256
        assert vocab // chunks * tokens * 4 <= 8 * 2**20


def test_narrow_inputs_round_as_the_other(monkeypatch):
    """bfloat16 hidden states and head: gradients in their dtype, near float32's."""
    arrays = inputs(2, 4, 64)
    narrow = tuple(x.astype(jnp.bfloat16) for x in arrays[:2]) + arrays[2:]
    _, (hidden_bar, head_bar) = by_vocabulary(0.0, None, 4, None, *narrow)
    assert (hidden_bar.dtype, head_bar.dtype) == (jnp.bfloat16, jnp.float32)
    wide = (x.astype(jnp.float32) for x in narrow[:2])
    _, want = by_vocabulary(0.0, None, 4, None, *wide, *arrays[2:])
    assert small.relative((hidden_bar, head_bar), want) < 2e-2
