"""Small shards whose tokens are known, for tests of what reads them."""

import hashlib
from pathlib import Path

import numpy as np

from data.batches.dataset import DatasetSpec, TokenSource
from data.cache import token_shard
from data.cache.shard_io import read_head
from data.cache.token_array import TokenArray
from data.cache.token_shard import TokenShard

VOCAB = 60_002


def write_shards(root, sizes, first=1):
    """Shards of so many tokens, and each one's tokens as a list.

    Tokens count up from `first` over all shards, but the last of a shard is EOS, 0.
    """
    shards, tokens = [], []
    for index, size in enumerate(sizes):
        ids = np.arange(first, first + max(size - 1, 0), dtype=np.uint32)
        first += len(ids)
        directory = str(Path(root) / f"shard-{index}")
        documents = [(ids, np.array([len(ids)]))] if size else []
        counts = token_shard.write_shard(directory, documents, vocab_size=VOCAB, eos_id=0)
        shards.append(TokenShard(directory, counts.tokens, counts.check))
        tokens.append([*ids.tolist(), 0] if size else [])
    return tuple(shards), tokens


def rows_of(tokens, length):
    """The rows of a source, cut by hand: aligned ones shard by shard, then the joined tails."""
    rows, tail = [], []
    for shard in tokens:
        whole = len(shard) // length * length
        rows += [shard[begin : begin + length] for begin in range(0, whole, length)]
        tail += shard[whole:]
    return rows + [tail[i : i + length] for i in range(0, len(tail) - length + 1, length)]


def source(shards, name="web", io_block_size=8, window_blocks=4, seed=0):
    """A source with a small shuffle."""
    return TokenSource(
        name=name,
        shards=tuple(shards),
        io_block_size=io_block_size,
        window_blocks=window_blocks,
        seed=seed,
    )


def spec(*sources, length=32, **more):
    """A data set of rows of 32 tokens."""
    more = {"vocab_size": VOCAB, "eos_id": 0, "sequence_length": length, **more}
    return DatasetSpec(sources=sources, **more)


def content_digest(directory, check=""):
    """`ShardCounts.digest` of what a shard has in storage."""
    head = read_head(directory, check)
    offsets = token_shard.read_offsets(directory, check)
    tokens = np.empty((0, 0), np.int32)
    if head.tokens:
        shard = TokenShard(directory, head.tokens, check)
        tokens = TokenArray([shard], head.attributes["vocab_size"]).read(np.array([0]), head.tokens)
    digest = hashlib.sha256(tokens.astype(head.dtype).tobytes())
    digest.update(offsets.astype("<i8").tobytes())
    digest.update(f"{head.dtype.name} {len(offsets) - 1} {offsets[-1]}\n".encode())
    return digest.hexdigest()


def describe(directory):
    """A shard's metadata: tokens, documents, dtype, vocab_size, eos_id, tokenizer."""
    head = read_head(directory, "")
    return {
        "tokens": head.tokens,
        "documents": len(token_shard.read_offsets(directory)) - 1,
        "dtype": head.dtype.name,
        **head.attributes,
    }
