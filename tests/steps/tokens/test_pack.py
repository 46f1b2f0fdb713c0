"""The packing step: rows of whole documents for training, the input's shards for the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from data.batches.packing import fill
from data.batches.packing import pack as lay
from data.cache.token_array import TokenArray
from data.cache.token_shard import write_shard
from pipeline import InputError, Result, StepContext, step
from pipeline.errors import PonenteError
from pipeline.store import storage
from steps.artifacts import TokenCache
from steps.tokens.pack import pack
from tests.data.token_shards import describe
from tests.pipeline.helpers import bring_up, check_invariants
from tests.steps.built import built

VOCAB, EOS, LENGTH = 500, 0, 64
SHARDS = {"train/a/000": 40, "train/a/001": 1, "train/b/000": 0, "validation/a/000": 7}


def documents(name: str) -> list[np.ndarray]:
    """A shard's documents, some longer than a row, some empty."""
    rng = np.random.default_rng(list(name.encode()))
    return [rng.integers(1, VOCAB, n) for n in rng.integers(0, 3 * LENGTH, SHARDS[name])]


def write_documents(directory: str, name: str) -> Mapping[str, Any]:
    """Shard writer: those documents."""
    texts = documents(name)
    sizes = np.array([len(text) for text in texts], np.int64)
    ids = np.concatenate([np.empty(0, np.int64), *texts])
    place = storage.join(directory, "cache")
    written = write_shard(place, [(ids, sizes)], vocab_size=VOCAB, eos_id=EOS, tokenizer_digest="t")
    return {"tokens": written.tokens, "documents": written.documents, "check": written.check}


@step(output=TokenCache, version=1)
def synthetic(run: StepContext, *, only: str = "") -> Result:
    """A token cache of random ids."""
    written = run.map(write_documents, {n: n for n in SHARDS if n.startswith(only)})
    with run.shard("vocabulary") as directory:
        storage.write_atomic(storage.join(directory, "token_bytes.json"), b"[1, 2]")
    train = sum(s.result["tokens"] for s in written.values() if s.name.startswith("train/"))
    splits = {"train": {"tokens": train, "unigram_entropy": 6.1}}
    return {"vocab_size": VOCAB, "eos_id": EOS, "tokenizer": "t", "splits": splits}


def run(prefix: str, **config: Any) -> tuple[TokenCache, dict[str, Any]]:
    """The packed cache and its result."""
    cache = built(prefix, pack(synthetic(**config), sequence_length=LENGTH), TokenCache)
    return cache, cache.result


def stream(name: str) -> tuple[np.ndarray, np.ndarray]:
    """A shard's ids with EOS after each document, and the documents' offsets."""
    texts = [np.append(text, EOS) for text in documents(name)]
    offsets = np.cumsum([0, *[len(text) for text in texts]])
    return np.concatenate([np.empty(0, np.int64), *texts]), offsets


def test_training_shards_hold_the_rows_of_their_documents(tmp_path):
    """Each shard's tokens are what packing its documents gives, and their number is whole rows."""
    cache, _ = run(str(tmp_path))
    shards = cache.split("train")
    assert [shard.name for shard in cache.shards()] == [n for n in SHARDS if "train" in n]
    for name, shard in zip([n for n in SHARDS if "train" in n], shards, strict=True):
        tokens, offsets = stream(name)
        rows = fill(lay(offsets, LENGTH), tokens, LENGTH, EOS)
        assert shard.tokens == rows.size
        if rows.size:
            with TokenArray([shard], VOCAB, tokenizer_digest="t") as array:
                found = array.read(np.arange(0, rows.size, LENGTH), LENGTH)
            assert np.array_equal(found, rows)
    described = describe(shards[0].directory)
    assert (described["vocab_size"], described["eos_id"]) == (VOCAB, EOS)
    check_invariants(str(tmp_path), finished=True)


def test_the_result_counts_padding_and_cuts(tmp_path):
    """Counted anew from the documents."""
    cache, result = run(str(tmp_path))
    names = [n for n in SHARDS if "train" in n]
    sizes = [len(text) + 1 for name in names for text in documents(name)]
    laid = [lay(stream(name)[1], LENGTH) for name in names]
    rows, fronts = (sum(getattr(each, n) for each in laid) for n in ("row_count", "fronts"))
    filled = sum(sizes) + fronts
    assert result["tokens_packed"] == sum(sizes)
    assert result["documents"] == len(sizes)
    assert result["documents_cut"] == sum(size >= LENGTH for size in sizes)
    assert result["documents_cut"] < result["documents_cut_by_joining"]
    assert (result["rows"], result["sequence_length"]) == (rows, LENGTH)
    assert result["rows_with_eos_in_front"] == fronts
    assert result["padding_tokens"] == rows * LENGTH - filled
    assert result["padding_share"] == pytest.approx(1 - filled / (rows * LENGTH))
    assert result["padding_share"] < result["padding_share_of_next_fit"]
    assert result["splits"]["train"] == {"tokens": sum(sizes), "unigram_entropy": 6.1}
    assert cache.tokens("train") == rows * LENGTH


def test_what_is_not_training_comes_from_the_input(tmp_path):
    """Validation shards and the vocabulary are the unpacked cache's; nothing is copied."""
    cache, _ = run(str(tmp_path))
    (shard,) = cache.split("validation")
    tokens, _ = stream("validation/a/000")
    with TokenArray([shard], VOCAB) as array:
        assert np.array_equal(array.read(np.zeros(1, np.int64), len(tokens))[0], tokens)
    assert not shard.directory.startswith(cache.path)
    assert cache.token_bytes().tolist() == [1, 2]


@pytest.mark.slow
def test_a_second_packing_and_a_cache_without_training_tokens_are_refused(tmp_path):
    """Rows are no documents; no documents give no rows."""
    cache = synthetic()
    with pytest.raises(InputError, match="expected documents, found the rows that `pack` makes"):
        pack(pack(cache, sequence_length=LENGTH), sequence_length=LENGTH)
    with pytest.raises(PonenteError, match="found no training tokens"):
        bring_up(str(tmp_path), pack(synthetic(only="validation"), sequence_length=LENGTH))
