"""Log-likelihoods of continuations and accuracies, against float64 NumPy."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import InputError
from tests.models import reference
from tests.training import tiny
from training.evaluate.loglikelihood import Continuation, Likelihood, Question, accuracy, answer
from training.step.train_step import Boundaries

LONGEST = 24


@functools.cache
def likelihood(devices=1, batch_size=tiny.BATCH):
    program = tiny.program(devices)
    return Likelihood(
        tiny.MODEL,
        dataclasses.replace(program.train, sequence_length=LONGEST),
        program.layout,
        Boundaries(eos_id=tiny.EOS),
        batch_size=batch_size,
    )


@functools.cache
def model(devices=1):
    """Sharper than a fresh one, so that choices differ."""
    return jax.tree.map(lambda x: x * 3, tiny.program(devices).init().model)


def requests(count, seed=0, longest=LONGEST):
    """Rows of 2 to `longest` random ids, with a continuation that begins anywhere."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        ids = rng.integers(1, tiny.VOCAB, rng.integers(2, longest + 1))
        found.append(Continuation(tuple(ids.tolist()), int(rng.integers(1, len(ids)))))
    return found


@functools.cache
def losses(ids):
    """float64 negative log-likelihoods and logits of one row, by the reference model."""
    row = np.array(ids)[None]
    return reference.nll(model(), row)[0][0], reference.logits(model(), row)[0]


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "batch_size"), [(1, 8), (8, 16)])
def test_log_likelihoods_are_those_of_the_reference(devices, batch_size):
    """Rows of many lengths, more than a batch, in the order they were given."""
    asked = requests(21)
    got = likelihood(devices, batch_size)(model(devices), asked)
    for one, request in zip(got, asked, strict=True):
        nll, logits = losses(request.ids)
        assert one.nats == pytest.approx(-nll[request.first - 1 :].sum(), rel=1e-5, abs=1e-5)
        best = logits.argmax(-1)[request.first - 1 : -1].tolist()
        assert one.greedy == (best == list(request.ids[request.first :]))


@pytest.mark.slow
def test_a_greedy_continuation_is_told():
    ids = [5, 9]
    for _ in range(4):
        ids.append(int(losses(tuple(ids))[1][-1].argmax()))
    other = (*ids[:-1], (ids[-1] + 1) % tiny.VOCAB)
    found = likelihood()(model(), [Continuation(tuple(ids), 2), Continuation(other, 2)])
    assert [one.greedy for one in found] == [True, False]


@pytest.mark.slow
def test_a_row_that_is_too_long_loses_its_beginning():
    """Its last 24 tokens are what counts; a continuation that does not fit is cut as well."""
    ids = tuple(np.random.default_rng(1).integers(1, tiny.VOCAB, 40).tolist())
    found = likelihood()(model(), [Continuation(ids, 35), Continuation(ids, 3)])
    short = [Continuation(ids[-LONGEST:], 19), Continuation(ids[-LONGEST:], 1)]
    assert found == likelihood()(model(), short)


@pytest.mark.parametrize("wrong", [Continuation((1, 2), 0), Continuation((1, 2), 2)])
def test_a_continuation_of_nothing_or_without_tokens_is_refused(wrong):
    with pytest.raises(InputError, match="after at least one token"):
        likelihood()(model(), [wrong])


@pytest.mark.slow
def test_rows_are_compiled_once_a_length():
    """A second call with other requests of the same lengths compiles nothing."""
    scorer = likelihood()
    scorer(model(), requests(30, seed=2))
    before = scorer._step._cache_size()
    scorer(model(), requests(30, seed=3))
    assert scorer._step._cache_size() == before <= 2


QUESTIONS = st.lists(
    st.integers(2, 5).flatmap(
        lambda n: st.tuples(
            st.lists(st.floats(-50, -0.1), min_size=n, max_size=n),
            st.lists(st.integers(1, 30), min_size=n, max_size=n),
            st.integers(0, n - 1),
        )
    ),
    min_size=1,
    max_size=20,
)


@given(QUESTIONS)
def test_accuracies_are_what_they_say(drawn):
    """By plain Python: the largest sum, the largest sum per byte, the first of equals."""
    questions = [
        Question((0,), tuple((1,) for _ in s), g, tuple(n), tuple(2 * x + 1 for x in n))
        for s, n, g in drawn
    ]
    got = accuracy(questions, [np.array(sums) for sums, _, _ in drawn])
    right = [sums.index(max(sums)) == gold for sums, _, gold in drawn]
    assert got["acc"] == pytest.approx(sum(right) / len(right))
    for name, length in (("acc_bytes", lambda n: n), ("acc_norm", lambda n: 2 * n + 1)):
        ratios = [[a / length(b) for a, b in zip(s, n, strict=True)] for s, n, _ in drawn]
        hits = [r.index(max(r)) == gold for r, (_, _, gold) in zip(ratios, drawn, strict=True)]
        assert got[name] == pytest.approx(sum(hits) / len(hits))
    assert got["items"] == len(drawn)
    if len(right) > 1:
        share = sum(right) / len(right)
        assert got["acc_stderr"] == pytest.approx((share * (1 - share) / (len(right) - 1)) ** 0.5)


def test_every_choice_is_scored_after_its_context():
    rng = np.random.default_rng(4)
    ids = rng.integers(1, tiny.VOCAB, (6, 10)).tolist()
    questions = [
        Question((tiny.EOS, *row[:4]), (tuple(row[4:7]), tuple(row[7:])), 0, (3, 3)) for row in ids
    ]
    found = answer(likelihood(), model(), questions)
    for sums, question in zip(found, questions, strict=True):
        for got, choice in zip(sums, question.choices, strict=True):
            nll = losses((*question.context, *choice))[0]
            assert got == pytest.approx(-nll[len(question.context) - 1 :].sum(), rel=1e-5)
