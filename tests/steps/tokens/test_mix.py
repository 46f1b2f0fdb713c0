"""A mixture reads its inputs by weight, phase after phase, and training can be done on it."""

from __future__ import annotations

import numpy as np
import pytest

from data.batches.dataset import Dataset, epochs
from models.shape.config import TransformerConfig
from pipeline.errors import PonenteError
from steps.artifacts import Checkpoint, Sequences
from steps.tokens.pack import pack
from steps.tokens.sequences import Phase, block_shuffle, mix
from steps.training.train import train
from tests.pipeline.helpers import bring_up, executed
from tests.steps.built import built
from tests.steps.synthetic import EOS, VOCAB, synthetic
from training.config import OptimizerConfig, TrainConfig

LENGTH = 32
MODEL = TransformerConfig(
    vocab_size=VOCAB, layers=1, embed=16, heads=2, kv_heads=1, head_size=8, mlp=32
)


def shuffled(cache, length=LENGTH):
    return block_shuffle(cache, sequence_length=length, io_block_size=2, window_blocks=8)


def low_and_high(**more):
    """Two inputs whose ids do not overlap: below 32, and from 32 on."""
    return [shuffled(synthetic(high=32, **more)), shuffled(synthetic(low=32, **more))]


def shares(rows):
    """Of rows of one source each, the share of those from 32 on; refuses rows of both."""
    from_high = [{int(t) >= 32 for t in row if t != EOS} for row in rows]
    assert all(len(kinds) == 1 for kinds in from_high)
    return sum(True in kinds for kinds in from_high) / len(from_high)


@pytest.mark.slow
def test_weights_hold_from_each_phase_on_without_tokenising_again(tmp_path):
    """Shares follow the weights to within a sequence in 4,096; other weights rerun one step."""
    store = str(tmp_path)
    phase = Phase(start_tokens=4096 * LENGTH - 5, weights=(1.0, 0.0))
    node = mix(low_and_high(), weights=(1.0, 3.0), later=(phase,))
    spec = built(store, node, Sequences).dataset()
    with Dataset(spec) as data:
        rows = data.read(np.arange(4096 + 100))
    high = (shares(rows) * len(rows)) / (sum(s.tokens for s in spec.sources[1].shards) // LENGTH)
    assert epochs(spec, len(rows))[1] == pytest.approx(high)
    assert shares(rows[:4096]) == pytest.approx(0.75, abs=4 / 4096)
    assert shares(rows[4096:]) == 0.0
    other = mix(low_and_high(), weights=(1.0, 1.0))
    assert executed(store, other) == ["mix"]
    with Dataset(built(store, other, Sequences).dataset()) as data:
        assert shares(data.read(np.arange(4096))) == pytest.approx(0.5, abs=4 / 4096)


def test_each_input_is_read_to_its_end_before_it_repeats(tmp_path):
    """Whatever comes between, the first n rows drawn from an input of n rows are all its rows."""
    store = str(tmp_path)
    parts = low_and_high()
    node = mix(parts, weights=(1.0, 2.0), seed=3)
    with Dataset(built(store, node, Sequences).dataset()) as data:
        rows = data.read(np.arange(2000))
    high = [row.tobytes() for row in rows if (row >= 32).any()]
    with Dataset(built(store, parts[1], Sequences).dataset()) as alone:
        count = alone.sequences
        expected = {row.tobytes() for row in alone.read(np.arange(count))}
    assert count < len(high)
    assert set(high[:count]) == expected


def test_a_mixture_has_the_same_content_in_every_store(tmp_path):
    """So that models trained on it in one store are found in another one."""
    node = mix(low_and_high(), weights=(1.0, 2.0))
    stores = (str(tmp_path / name) for name in ("one", "two"))
    one, two = (built(store, node, Sequences).manifest for store in stores)
    assert str(tmp_path) not in str(one.result)
    assert one.content == two.content


@pytest.mark.parametrize(
    ("node", "words"),
    [
        (
            lambda: mix(
                [shuffled(synthetic()), shuffled(synthetic(tokenizer="u"))], weights=(1, 1)
            ),
            "has tokenizer u",
        ),
        (
            lambda: mix([mix(low_and_high(), weights=(1.0, 1.0))] * 2, weights=(1.0, 1.0)),
            "is a mixture already",
        ),
    ],
)
def test_what_does_not_mix_is_refused(tmp_path, node, words):
    """Each refusal names what differs."""
    with pytest.raises(PonenteError, match=words):
        bring_up(str(tmp_path), node())


@pytest.mark.slow
def test_training_on_a_mixture_of_packed_and_joined_documents(tmp_path):
    """A model trains on it with documents apart; padding is not counted; a rerun does nothing."""
    store = str(tmp_path)
    packed = shuffled(pack(synthetic(high=32, documents=200), sequence_length=LENGTH))
    joined = shuffled(synthetic(low=32))
    sequences = mix([packed, joined], weights=(1.0, 1.0))
    config = TrainConfig(
        steps=3,
        batch_size=8,
        sequence_length=LENGTH,
        separate_documents=True,
        compute_dtype="float32",
        evaluate_every=3,
    )
    node = train(sequences, model=MODEL, optimizer=OptimizerConfig(), train=config)
    rows = built(store, node, Checkpoint).rows("history")
    with Dataset(built(store, sequences, Sequences).dataset()) as data:
        seen = data.read(np.arange(3 * 8)).reshape(3, 8, LENGTH)
    padding = (seen[..., :-1] == EOS) & (seen[..., 1:] == EOS)
    assert padding.any(), "the packed input must have padding for this test to mean anything"
    counted = (~padding).sum(axis=(1, 2)).tolist()
    assert [row["tokens"] for row in rows] == counted
    assert executed(store, node) == []
