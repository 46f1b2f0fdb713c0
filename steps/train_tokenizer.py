"""Train a byte-level BPE tokenizer on the training split of a sample."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from data.vocabulary import check_vocab_size
from pipeline import Result, StepContext, step
from pipeline.store import storage
from steps.artifacts import TRAIN, Documents, Tokenizer


def _check(arguments: Mapping[str, Any]) -> None:
    check_vocab_size(arguments["vocab_size"])


@step(output=Tokenizer, version=1, check=_check)
def train_tokenizer(run: StepContext, documents: Documents, *, vocab_size: int) -> Result:
    """A tokenizer of exactly `vocab_size` entries; refuses when the text supports fewer."""
    from data.tokenizer import TextTokenizer, train

    tokenizer_json = train(_texts(run, documents), vocab_size)
    with run.shard("tokenizer") as directory:
        storage.write_atomic(storage.join(directory, "tokenizer.json"), tokenizer_json)
    tokenizer = TextTokenizer(tokenizer_json)
    return {"vocab_size": tokenizer.vocab_size, "digest": tokenizer.digest}


def _texts(run: StepContext, documents: Documents) -> Iterator[list[str]]:
    from data.table import read_table

    files = documents.files(TRAIN)
    for index, (_, file) in enumerate(files):
        for batch in read_table(file, ("text",)):
            yield batch.column("text").to_pylist()
        run.progress(index + 1, len(files), "shards read")
