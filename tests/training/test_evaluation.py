"""Evaluation against sums written out in NumPy, and the law of which rows are read."""

import dataclasses
import math

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import InputError
from tests.training import tiny
from training.evaluation import evaluate, plan_rows, validation_batches

SIZES = st.integers(1, 40)


@given(st.integers(0, 5000), st.integers(2, 40), SIZES, SIZES)
def test_rows_are_a_disjoint_prefix_of_the_split(tokens, length, size, batches):
    """Rows follow one another from token 0, and as many are read as fit and are allowed."""
    config = dataclasses.replace(
        tiny.TRAIN, batch_size=size, sequence_length=length, evaluate_batches=batches
    )
    rows = plan_rows(tokens, config)
    assert [start for start, _ in rows] == [i * length for i in range(len(rows))]
    assert all(got == length for _, got in rows[:-1])
    assert len(rows) <= size * batches
    read = sum(got for _, got in rows)
    assert read <= tokens
    assert len(rows) == size * batches or tokens - read < 2


def oracle(model, split, rows):
    """Nats, predicted tokens and bytes over `rows` of a split, one row at a time."""
    nll, tokens, size = 0.0, 0, 0
    for start, length in rows:
        row = split[start : start + length]
        named = hax.named(jnp.asarray(row)[None], ("batch", "position"))
        logits = np.asarray(model.logits(named).array[0], np.float64)
        log_z = np.log(np.exp(logits).sum(axis=-1))
        nll += sum(log_z[i] - logits[i, row[i + 1]] for i in range(length - 1))
        tokens += length - 1
        size += sum(tiny.TOKEN_BYTES[token] for token in row[1:])
    return nll, tokens, size


@pytest.mark.parametrize(("tokens", "devices"), [(600, 1), (600, 4), (300, 1), (100, 4), (20, 1)])
def test_scores_are_exact_token_means(tokens, devices):
    """Full batches, a partly filled one, and a split shorter than a row all match the oracle."""
    program = tiny.program(devices, evaluate_batches=2)
    split = np.random.default_rng(tokens).integers(0, tiny.VOCAB, tokens).astype(np.int32)

    def read(starts, length):
        return np.stack([split[s : s + length] for s in starts])

    batches = validation_batches(tokens, read, program.train, program.layout)
    model = program.init().model
    table = jnp.asarray(tiny.TOKEN_BYTES, jnp.int32)
    scores = evaluate(program.evaluation_step, model, batches, table)
    nll, count, size = oracle(jax.device_get(model), split, plan_rows(tokens, program.train))
    assert (scores["tokens"], scores["bytes"]) == (count, size)
    assert scores["loss"] == pytest.approx(nll / count, rel=1e-5)
    assert scores["bits_per_byte"] == pytest.approx(nll / math.log(2) / size, rel=1e-5)


def test_uniform_model_has_log_vocab_loss():
    """A model with zero output scores log(vocab) nats per token whatever the text."""
    program = tiny.program(1)
    model = jax.tree.map(jnp.zeros_like, program.init().model)
    split = tiny.random_tokens(0)
    batches = validation_batches(split.size, lambda s, n: split, program.train, program.layout)
    scores = evaluate(program.evaluation_step, model, batches, jnp.ones(tiny.VOCAB, jnp.int32))
    assert scores["loss"] == pytest.approx(math.log(tiny.VOCAB), rel=1e-5)
    assert scores["bits_per_byte"] == pytest.approx(math.log2(tiny.VOCAB), rel=1e-5)


def test_a_split_without_a_prediction_is_refused():
    """One token predicts nothing; the message says how many there are."""
    program = tiny.program(1)
    with pytest.raises(InputError, match="has 1 tokens"):
        validation_batches(1, lambda s, n: None, program.train, program.layout)
