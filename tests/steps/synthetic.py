"""A token cache of random ids from a range, for steps that only care whose tokens they read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from data.cache.token_shard import write_shard
from pipeline import Result, StepContext, step
from pipeline.store import storage
from steps.artifacts import TokenCache

VOCAB, EOS = 64, 0
ENTROPY = 4.0  # near log 64, what a model of nothing scores


def write_documents(directory: str, item: tuple[int, int, int, int, str]) -> Mapping[str, Any]:
    """Shard writer: documents of 5 to 40 ids in [low, high)."""
    number, documents, low, high, tokenizer = item
    rng = np.random.default_rng([number, low])
    sizes = rng.integers(5, 41, documents)
    written = write_shard(
        storage.join(directory, "cache"),
        [(rng.integers(low, high, sizes.sum()).astype(np.uint32), sizes)],
        vocab_size=VOCAB,
        eos_id=EOS,
        tokenizer_digest=tokenizer,
    )
    return {"tokens": written.tokens, "documents": documents, "check": written.check}


@step(output=TokenCache, version=1)
def synthetic(
    run: StepContext,
    *,
    low: int = 1,
    high: int = VOCAB,
    documents: int = 60,
    tokenizer: str = "t",
    held_out: tuple[str, ...] = ("validation",),
) -> Result:
    """Two training shards and one of each held-out split, as `tokenize` would leave them."""
    about = (documents, low, high, tokenizer)
    names = ["train/00000/0000", "train/00001/0000", *(f"{s}/00000/0000" for s in held_out)]
    written = run.map(write_documents, {name: (n, *about) for n, name in enumerate(names)})
    with run.shard("vocabulary") as directory:
        sizes = json.dumps([0] + [1] * (VOCAB - 1)).encode()
        storage.write_atomic(storage.join(directory, "token_bytes.json"), sizes)
    train = sum(s.result["tokens"] for n, s in written.items() if n.startswith("train/"))
    splits = {"train": {"tokens": train, "unigram_entropy": ENTROPY}}
    return {"vocab_size": VOCAB, "eos_id": EOS, "tokenizer": tokenizer, "splits": splits}
