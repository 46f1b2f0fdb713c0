"""Evaluation against sums written out in NumPy, and the law of which rows are read."""

import dataclasses
import math
from contextlib import closing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.cache.token_shard import TokenShard
from pipeline.errors import InputError
from tests.models import reference
from tests.training import tiny
from training.config import Parallelism
from training.evaluate import evaluator as evaluation
from training.evaluate.evaluator import Evaluator, evaluate, plan_sequences, read_batches
from training.metrics.differences import SequenceLosses
from training.step.train_step import Boundaries, make_evaluation_step

SIZES = st.integers(1, 40)


@given(st.integers(0, 5000), st.integers(2, 40))
def test_a_full_evaluation_reads_every_prediction_once(tokens, length):
    """Rows follow one another from token 0, and less than a prediction is left at the end."""
    rows = plan_sequences(tokens, length)
    assert rows.starts.tolist() == [i * length for i in range(len(rows.starts))]
    assert (rows.lengths[:-1] == length).all()
    assert (rows.lengths >= 2).all()
    assert 0 <= tokens - rows.lengths.sum() < 2


@given(st.integers(0, 5000), st.integers(2, 40), SIZES)
def test_a_part_is_spread_evenly_over_the_set(tokens, length, most):
    """As many rows as are allowed, in order, none twice, gaps equal but for one row."""
    whole, rows = plan_sequences(tokens, length), plan_sequences(tokens, length, most)
    numbers = (rows.starts // length).tolist()
    assert len(numbers) == min(most, len(whole.starts))
    assert numbers == sorted(set(numbers))
    assert set(zip(rows.starts.tolist(), rows.lengths.tolist(), strict=True)) <= set(
        zip(whole.starts.tolist(), whole.lengths.tolist(), strict=True)
    )
    if numbers:
        gaps = np.diff([*numbers, numbers[0] + len(whole.starts)])
        assert gaps.max() - gaps.min() <= 1


def oracle(model, split, rows):
    """Nats by row, predicted tokens and bytes over `rows` of a split, in float64."""
    nll, tokens, size = [], 0, 0
    for start, length in zip(rows.starts, rows.lengths, strict=True):
        row = split[start : start + length]
        nll.append(reference.nll(model, row[None])[0].sum())
        tokens += length - 1
        size += sum(tiny.TOKEN_BYTES[token] for token in row[1:])
    return np.array(nll), tokens, size


def random_split(tokens):
    """(ids of a split, the function that reads windows of it)."""
    split = np.random.default_rng(tokens).integers(0, tiny.VOCAB, tokens).astype(np.int32)
    return split, lambda starts, length: np.stack([split[s : s + length] for s in starts])


def scores(program, model, read, rows, batch_size=tiny.BATCH):
    batches = read_batches(rows, read, tiny.LENGTH, batch_size, program.layout)
    table = jnp.asarray(tiny.TOKEN_BYTES, jnp.int32)
    return evaluate(program.evaluation_step, model, batches, table, "validation")


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "most"), [(600, None), (600, 16), (600, 5), (20, None)])
def test_scores_are_exact_token_means(tokens, most):
    """Full batches, a partly filled one, a part of the set, and a set shorter than a row."""
    program = tiny.program(1)
    split, read = random_split(tokens)
    model, rows = program.init().model, plan_sequences(tokens, tiny.LENGTH, most)
    found, *by_sequence = scores(program, model, read, rows)
    nll, count, size = oracle(jax.device_get(model), split, rows)
    assert (found["tokens"], found["bytes"]) == (count, size)
    assert found["loss"] == pytest.approx(nll.sum() / count, rel=2e-6)
    assert found["bits_per_byte"] == pytest.approx(nll.sum() / math.log(2) / size, rel=2e-6)
    ours, counts = (each[: len(nll)] for each in by_sequence)
    np.testing.assert_allclose(ours, nll, rtol=5e-6)
    assert counts.tolist() == (rows.lengths - 1).tolist()
    assert not any(each[len(nll) :].any() for each in by_sequence)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "batch_size", "changes"),
    [
        (1, 24, {}),
        (8, 24, {}),
        (4, 8, {"parallel": Parallelism(sharding="replicated", tensor=2, sequence=2)}),
    ],
    ids=["batch", "devices", "tensor and sequence"],
)
def test_devices_and_batch_size_do_not_enter_the_figures(devices, batch_size, changes):
    """One device or many, batches of 8 or of 24 rows: the same to the rounding of a row."""
    program, one = tiny.program(devices, **changes), tiny.program(1)
    _, read = random_split(600)
    rows = plan_sequences(600, tiny.LENGTH)
    got, *ours = scores(program, program.init().model, read, rows, batch_size)
    want, *theirs = scores(one, one.init().model, read, rows)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a[: len(rows.starts)], b[: len(rows.starts)], rtol=5e-6)
    assert (got["tokens"], got["bytes"]) == (want["tokens"], want["bytes"])
    assert got["loss"] == pytest.approx(want["loss"], rel=1e-6)
    assert got["bits_per_byte"] == pytest.approx(want["bits_per_byte"], rel=1e-6)


@pytest.mark.slow
def test_a_split_whose_loss_mask_excludes_all_is_refused():
    program = tiny.program(1, masked=True)
    masked = np.full((8, tiny.LENGTH), tiny.VOCAB + 3, np.int32)
    rows = plan_sequences(8 * tiny.LENGTH, tiny.LENGTH)
    with pytest.raises(InputError, match=r"split 'validation': .* the loss mask excludes all"):
        scores(program, program.init().model, lambda starts, _: masked[: len(starts)], rows)


class Machine:
    """A step that is done when it is waited for; counts what waits to be done, and transfers."""

    def __init__(self, monkeypatch, nll):
        self.nll, self.waiting, self.most, self.fetched = nll, [], 0, 0
        monkeypatch.setattr(evaluation.jax, "block_until_ready", self.wait)
        monkeypatch.setattr(evaluation.jax, "device_get", self.get)

    def step(self, model, tokens, lengths, token_bytes):
        ones = np.ones(len(lengths), np.int32)
        self.waiting.append(result := (np.full(len(lengths), self.nll, np.float32), ones, ones))
        self.most = max(self.most, len(self.waiting))
        return result

    def wait(self, result):
        index = next(i for i, other in enumerate(self.waiting) if other is result)
        del self.waiting[: index + 1]

    def get(self, tree):
        self.fetched += 1
        return tree


def test_the_host_waits_for_room_only_and_reads_once(monkeypatch):
    """Of 500 batches few are on the way at any time, and numbers come back in one transfer."""
    machine = Machine(monkeypatch, 1000.1)
    batches = ((np.zeros((8, 4)), np.zeros(8)) for _ in range(500))
    found, *_ = evaluate(machine.step, None, batches, None, "validation")
    assert 1 < machine.most <= evaluation.IN_FLIGHT
    assert machine.fetched == 1
    # In float32 the sum of 4,000 such numbers is off by some 1e-5 of itself.
    assert found["loss"] == pytest.approx(float(np.float32(1000.1)), rel=1e-12)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Shards of two held-out splits, and the ids in them."""
    root = str(tmp_path_factory.mktemp("data"))
    sets = {"validation": [(600, 2), (400, 3)], "other": [(350, 4)]}
    found = {}
    for name, shards in sets.items():
        written = [
            tiny.write_tokens(f"{root}/{name}-{seed}", tokens, seed) for tokens, seed in shards
        ]
        found[name] = tuple(TokenShard(*shard) for shard in written)
    return found


def stream(shards):
    from data.cache.token_array import TokenArray

    with TokenArray(shards, tiny.VOCAB) as array:
        return array.read(np.zeros(1, np.int64), len(array))[0]


@pytest.mark.slow
def test_several_sets_whole(data):
    """The same figures each time, those of the sequences, from a step that is compiled once."""
    program = tiny.program(1)
    boundaries = Boundaries(eos_id=tiny.EOS, separate=program.train.separate_documents)
    step = make_evaluation_step(program.train, program.layout, program.backend, boundaries)
    evaluator = make(data, dataclasses.replace(program, evaluation_step=step))
    model = program.init().model
    rows, by_sequence = evaluator(model)
    assert (rows, by_sequence) == evaluator(model), "the same model has the same figures"
    evaluator.close()
    assert [row["split"] for row in by_sequence] == ["validation", "other"]
    assert len({row["of"] for row in by_sequence}) == 2
    for row, losses in zip(rows, map(SequenceLosses.of_row, by_sequence), strict=True):
        assert losses.sums[0].sum() / losses.sums[1].sum() == pytest.approx(row["loss"], rel=1e-6)
    assert [row["split"] for row in rows] == ["validation", "other"]
    assert step._cache_size() == 1


def make(data, program=None, **changes):
    program = program or tiny.program(1)
    fields = {"sequence_length": tiny.LENGTH, "batch_size": tiny.BATCH, **changes}
    given = program.evaluation_step, program.layout, tuple(data.items()), tiny.TOKEN_BYTES
    return Evaluator(*given, **fields)


def test_a_set_without_a_prediction_is_refused(data):
    """One token predicts nothing; the message names the set and says how many there are."""
    (shard, *_) = data["other"]
    short = {"short": (TokenShard(shard.directory, 1, shard.check),)}
    with pytest.raises(InputError, match="'short' has 1 tokens"):
        make(short)


def test_the_digest_is_of_the_tokens_that_are_read():
    """Other shards, a part of them, or another length of the sequences have another one."""
    shards = [TokenShard("a", 600, "x"), TokenShard("b", 400, "y")]
    moved = [shard._replace(directory=f"/elsewhere/{shard.directory}") for shard in shards]
    rows = plan_sequences(1000, 32)
    others = [
        rows.digest([shards[0], shards[1]._replace(check="z")]),
        plan_sequences(1000, 32, 8).digest(shards),
        plan_sequences(1000, 64).digest(shards),
    ]
    assert rows.digest(moved) == rows.digest(shards)
    assert len({rows.digest(shards), *others}) == 4


def test_no_rows_at_all_are_refused():
    """By the job that says so, which needs no devices."""
    with pytest.raises(InputError, match="sequences: expected int >= 1, found 0"):
        dataclasses.replace(tiny.score_job(""), sequences=0)


@pytest.mark.slow
def test_a_batch_is_rounded_up_to_the_devices(data):
    """Six rows on four devices are eight; the losses are those of batches of eight."""
    model = tiny.program(4).init().model
    scores = []
    for rows in (6, 8):
        with closing(make(data, tiny.program(4), batch_size=rows)) as evaluator:
            scores.append(evaluator(model))
    assert scores[0] == scores[1]


def test_how_many_sequences_a_configuration_asks_for():
    """So many batches' sequences whatever the evaluation's own batch, or all."""
    eight = dataclasses.replace(tiny.TRAIN, evaluate_batches=3, evaluate_batch_size=16)
    assert eight.evaluate_sequences == 3 * tiny.BATCH
    assert dataclasses.replace(eight, evaluate_batches="all").evaluate_sequences is None
