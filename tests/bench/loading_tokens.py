"""What the loading bench reads: a token cache."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from data.batches.dataset import DatasetSpec, TokenSource
from data.batches.mixture import MixturePhase
from data.cache.token_shard import TokenShard, write_shard
from data.tokenizer.text_tokenizer import TextTokenizer

_SHARD = 1_000_000  # tokens of a synthetic shard
_DOCUMENT = 1000
_VOCAB = 32_768


def prepare(work: Path, corpus: Path, synthetic: int) -> int:
    """Write `cache/` and `cache.json` into `work`, unless they are there; returns their tokens.

    Args:
        work: the directory.
        corpus: Parquet files with a column `text`, and a tokenizer.json.
        synthetic: random tokens to take instead of the corpus; 0 takes the corpus.
    """
    made_of = f"{synthetic} random tokens" if synthetic else str(corpus.resolve())
    record = work / "cache.json"
    if record.exists():
        found = json.loads(record.read_text())
        if found["made_of"] == made_of:
            return sum(tokens for _, tokens, _ in found["shards"])
        raise SystemExit(f"{work} has other tokens than {made_of}; give another --work")
    tokenizer = TextTokenizer((corpus / "tokenizer.json").read_bytes())
    vocab, eos = (_VOCAB, 0) if synthetic else (tokenizer.vocab_size, tokenizer.eos_id)
    batches = _random(synthetic) if synthetic else _encoded(corpus, tokenizer)
    shards = []
    for documents in batches:
        directory = str(work / "cache" / f"{len(shards):05}")
        counts = write_shard(directory, [documents], vocab_size=vocab, eos_id=eos)
        shards.append([directory, counts.tokens, counts.check])
    record.write_text(
        json.dumps({"made_of": made_of, "vocab": vocab, "eos": eos, "shards": shards})
    )
    return sum(tokens for _, tokens, _ in shards)


def spec(work: Path, length: int, io_block_size: int, window_blocks: int) -> DatasetSpec:
    """The prepared cache, shuffled so."""
    found = json.loads((work / "cache.json").read_text())
    source = TokenSource(
        name="bench",
        shards=tuple(TokenShard(*shard) for shard in found["shards"]),
        io_block_size=io_block_size,
        window_blocks=window_blocks,
        seed=0,
    )
    return DatasetSpec(
        sources=(source,), sequence_length=length, vocab_size=found["vocab"], eos_id=found["eos"]
    )


def mixture(work: Path, length: int) -> DatasetSpec:
    """The prepared cache as two sources of half the shards each, mixed three to one."""
    whole = spec(work, length, 64, 1024)
    (source,) = whole.sources
    halves = [
        dataclasses.replace(source, name=name, shards=source.shards[half::2])
        for half, name in enumerate(("even", "odd"))
    ]
    phases = (MixturePhase(start=0, weights=(3.0, 1.0)),)
    return dataclasses.replace(whole, sources=tuple(halves), phases=phases)


def _encoded(corpus: Path, tokenizer: TextTokenizer) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """One shard for each row group, as a run makes them."""
    for path in sorted(corpus.glob("*.parquet")):
        file = pq.ParquetFile(path)
        for group in range(file.num_row_groups):
            texts = file.read_row_group(group, columns=["text"]).column(0).to_pylist()
            yield tokenizer.encode_batch(texts)


def _random(tokens: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    numbers = np.random.default_rng(0)
    while tokens > 0:
        documents = max(1, min(tokens, _SHARD) // (_DOCUMENT + 1))
        ids = numbers.integers(1, _VOCAB, documents * _DOCUMENT, np.uint16)
        yield ids, np.full(documents, _DOCUMENT, np.int64)
        tokens -= documents * (_DOCUMENT + 1)
