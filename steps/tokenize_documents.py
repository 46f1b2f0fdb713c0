"""Documents to token ids: a TensorStore cache, a shard of documents per task."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pipeline import Result, StepRun, step, storage
from pipeline.manifest import Shard
from steps.artifacts import Documents, TokenCache, Tokenizer


@step(output=TokenCache, version=1, name="steps.tokenize", cpus=0)
def tokenize(run: StepRun, documents: Documents, tokenizer: Tokenizer) -> Result:
    """Every split of the documents as token ids, EOS after each document and nothing else added."""
    text_tokenizer = tokenizer.load()
    with run.shard("vocabulary") as directory:
        token_bytes = json.dumps(text_tokenizer.token_bytes.tolist()).encode()
        storage.write_atomic(storage.join(directory, "token_bytes.json"), token_bytes)
    splits = [s for s in ("train", "validation", "test") if documents.files(s)]
    written = run.map(
        tokenize_shard,
        {
            f"{split}/{name.rpartition('/')[2]}": (file, tokenizer.file)
            for split in splits
            for name, file in documents.files(split)
        },
    )
    return {
        "vocab_size": text_tokenizer.vocab_size,
        "eos_id": text_tokenizer.eos_id,
        "tokenizer": text_tokenizer.digest,
        "splits": {split: _summary(run, written, split, documents) for split in splits},
        "measured": {
            "cpu_seconds": sum(s.result["measured"]["cpu_seconds"] for s in written.values())
        },
    }


def tokenize_shard(directory: str, item: tuple[str, str]) -> Mapping[str, Any]:
    """Shard writer: one Parquet file's token cache and how often each id occurs."""
    import time

    import numpy as np

    from data.cache import write_shard
    from data.tokenizer import TextTokenizer

    file, tokenizer_file = item
    tokenizer = TextTokenizer.load(tokenizer_file)
    clock, cpu = time.monotonic(), time.process_time()
    written = write_shard(
        storage.join(directory, "cache"),
        _encoded(file, tokenizer),
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        tokenizer_digest=tokenizer.digest,
    )
    with storage.open_write(storage.join(directory, "occurrences.npy")) as out:
        np.save(out, written.counts, allow_pickle=False)
    return {
        "tokens": written.tokens,
        "documents": written.documents,
        "content": written.digest,
        "measured": {
            "seconds": time.monotonic() - clock,
            "cpu_seconds": time.process_time() - cpu,
        },
    }


def _encoded(file: str, tokenizer: Any) -> Iterator[tuple[Any, Any]]:
    from data.table import read_table

    for batch in read_table(file, ("text",)):
        yield tokenizer.encode_batch(batch.column("text").to_pylist())


def _summary(
    run: StepRun, written: Mapping[str, Shard], split: str, documents: Documents
) -> dict[str, Any]:
    import numpy as np

    from data.cache import unigram_entropy

    parts = [shard for shard in written.values() if shard.name.startswith(f"{split}/")]
    occurrences = 0
    for shard in parts:
        with storage.open_read(storage.join(run.root, shard.root, "occurrences.npy")) as file:
            occurrences = occurrences + np.load(file, allow_pickle=False)
    asked = documents.result["splits"][split]
    return {
        "tokens": sum(shard.result["tokens"] for shard in parts),
        "documents": sum(shard.result["documents"] for shard in parts),
        "tokens_asked": asked["tokens_asked"],
        "bytes": asked["bytes"],
        "unigram_entropy": unigram_entropy(np.asarray(occurrences)),
    }
