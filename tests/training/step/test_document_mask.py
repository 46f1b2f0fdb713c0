"""Documents of a row are told apart, in attention and in the loss, by their EOS tokens alone."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import models.named as hax
from tests.training import tiny
from training.step.train_step import Boundaries, LossFunction

EOS = tiny.EOS
ROWS = st.lists(st.integers(0, 3), min_size=16, max_size=16)  # one shape, compiled once


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(ROWS)
def test_segments_begin_at_every_eos(row):
    """The segment of a token is the number of EOS up to and with it, counted in plain Python."""
    found = Boundaries(eos_id=EOS, separate=True).segments(jnp.asarray([row], jnp.int32))
    assert found is not None
    assert found.array[0].tolist() == [row[: i + 1].count(EOS) for i in range(len(row))]
    assert Boundaries(eos_id=EOS).segments(jnp.asarray([row], jnp.int32)) is None


@settings(max_examples=100, deadline=None)
@given(ROWS)
def test_padding_is_eos_after_eos_and_does_not_count(row):
    """A prediction counts unless it is of an EOS made at an EOS; without padding all count."""
    tokens = jnp.asarray([row], jnp.int32)
    found = Boundaries(eos_id=EOS, padded=True).counted(tokens)
    assert found is not None
    expected = [not (a == b == EOS) for a, b in itertools.pairwise(row)]
    assert found.array[0, :-1].tolist() == expected
    assert Boundaries(eos_id=EOS).counted(tokens) is None


@settings(max_examples=100, deadline=None)
@given(ROWS)
def test_ids_beyond_the_vocabulary_are_read_and_not_predicted(row):
    """Of a vocabulary of 2, ids 2 and 3 are 0 and 1; both rules of what counts hold together."""
    stored = jnp.asarray([row], jnp.int32)
    boundaries = Boundaries(eos_id=EOS, padded=True, masked_from=2)
    assert boundaries.tokens(stored)[0].tolist() == [i % 2 for i in row]
    found = boundaries.counted(stored)
    assert found is not None
    expected = [b < 2 and not (a == b == EOS) for a, b in itertools.pairwise(row)]
    assert found.array[0, :-1].tolist() == expected


def loss_of(tokens, *, separate=False, padded=False):
    """Summed nll and count of int32 [batch, position] under the tiny model."""
    boundaries = Boundaries(eos_id=EOS, separate=separate, padded=padded)
    config = dataclasses.replace(tiny.TRAIN, loss_chunks=1)
    function = LossFunction(config, tiny.program().layout, "reference", boundaries)
    _, sums = jax.jit(function)(tiny.program().init().model, tokens)
    return float(sums.nll), float(sums.count)


def documents(seed, lengths):
    """Documents of random ids, none of them EOS."""
    ids = np.random.default_rng(seed)
    return [ids.integers(1, tiny.VOCAB, n).tolist() for n in lengths]


def alone(tokens):
    """nll of every prediction of one sequence by itself, float64 [position - 1]."""
    # What follows the sequence is not seen by it; one length is compiled once.
    row = np.pad(np.array(tokens, np.int32), (0, tiny.LENGTH - len(tokens)), constant_values=1)
    logits = np.asarray(_logits(jnp.asarray(row[None])), np.float64)[0, : len(tokens)]
    log_z = np.log(np.exp(logits).sum(axis=-1))
    return log_z[:-1] - logits[np.arange(len(tokens) - 1), tokens[1:]]


def _logits(tokens):
    rows = hax.named(tokens, ("batch", "position"))
    return jax.jit(lambda model: model.logits(rows).array)(tiny.program().init().model)


@pytest.mark.slow
def test_separate_documents_score_as_they_do_alone():
    """The loss of a row is that of its documents one by one, each behind its own EOS."""
    first, second, third = documents(0, (9, 13, 7))
    row = [*first, EOS, *second, EOS, *third]
    expected = alone([*first, EOS]).sum()
    expected += alone([EOS, *second, EOS]).sum() + alone([EOS, *third]).sum()
    tokens = jnp.asarray([row] * tiny.BATCH, jnp.int32)
    nll, count = loss_of(tokens, separate=True)
    assert count == tiny.BATCH * (len(row) - 1)
    assert nll == pytest.approx(tiny.BATCH * expected, rel=1e-5)
    joined, _ = loss_of(tokens)
    assert joined != pytest.approx(nll, rel=1e-4), "attention must reach across when asked to"


@pytest.mark.slow
def test_a_padded_row_scores_as_its_documents():
    """Padding adds nothing to the sum and nothing to the count, and no gradient."""
    first, second = documents(1, (8, 10))
    row = [*first, EOS, *second, EOS]
    padded = row + [EOS] * (tiny.LENGTH - len(row))
    nll, count = loss_of(jnp.asarray([padded] * tiny.BATCH, jnp.int32), separate=True, padded=True)
    plain, plain_count = loss_of(jnp.asarray([row] * tiny.BATCH, jnp.int32), separate=True)
    assert (nll, count) == (pytest.approx(plain, rel=1e-6), plain_count)


@pytest.mark.slow
def test_the_switch_reaches_the_compiled_step():
    """`separate_documents` changes the loss of a step on rows with several documents."""
    tokens = tiny.random_tokens(5)
    tokens[:, 11::7] = EOS
    losses = {}
    for separate in (False, True):
        program = tiny.program(separate_documents=separate)
        placed = program.layout.place(tokens, tiny.BATCH)
        losses[separate] = float(program.step(program.init(), placed)[1]["loss"])
    assert losses[True] == pytest.approx(
        loss_of(jnp.asarray(tokens), separate=True)[0] / tokens[:, 1:].size, rel=1e-5
    )
    assert losses[True] != pytest.approx(losses[False], rel=1e-4)
    assert dataclasses.replace(tiny.TRAIN, separate_documents=True) != tiny.TRAIN
