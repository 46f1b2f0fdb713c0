"""What cannot be trained is refused before anything starts."""

import dataclasses

import pytest

from data.cache.token_shard import TokenShard
from pipeline.errors import InputError
from tests.training import tiny
from training.config.job import check_job

VALID = 32 * 8


def data(*tokens, **changes):
    """One source with shards of so many tokens, which need not be there."""
    spec = tiny.dataset(*(TokenShard(str(i), count, "") for i, count in enumerate(tokens)))
    return dataclasses.replace(spec, **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data": data(VALID, vocab_size=65)}, "vocab_size is 64, the tokenizer has 65"),
        ({"data": data(VALID, sequence_length=16)}, "is 32, the shuffled sequences are 16"),
        ({"token_bytes": (1,) * 63}, "expected 64 entries"),
        ({"data": data()}, "more than the 0 training tokens of tiny"),
        ({"data": data(31)}, "32 is more than the 31 training tokens"),
        ({"data": data(32 * 8 - 1)}, "8 sequences of 32 tokens are more than the 7"),
        ({"resume_from": ((4, "b"), (2, "a"))}, r"rising order, got \[4, 2\]"),
    ],
)
def test_refusals_are_one_line(changes, words):
    """Each refusal says what was expected and what was found, in one line."""
    with pytest.raises(InputError, match=words) as caught:
        check_job(tiny.make_job("nowhere", **changes))
    assert "\n" not in str(caught.value)


def test_exactly_one_batch_is_enough():
    """A job with as many sequences as one batch has is accepted."""
    check_job(tiny.make_job("nowhere", data=data(200, 56)))
