"""Train a byte-level BPE tokenizer on the training split of a sample."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeAlias, get_args

from data.tokenizer.special_tokens import check_vocab_size
from models.shape.validation import at_least
from pipeline import InputError, Result, StepContext, step
from pipeline.store import storage
from steps.artifacts import TRAIN, Documents, Tokenizer

Expression: TypeAlias = Literal["gpt2", "cl100k", "nanochat", "qwen2", "o200k"]
"""Names of `data.tokenizer.expressions.EXPRESSIONS`."""


def _check(arguments: Mapping[str, Any]) -> None:
    check_vocab_size(arguments["vocab_size"])
    if (name := arguments["pre_tokenizer"]) not in get_args(Expression):
        raise InputError(
            f"train_tokenizer.pre_tokenizer: expected one of {', '.join(get_args(Expression))}, "
            f"found {name!r}"
        )
    if (tokens := arguments["tokens"]) is not None:
        at_least("train_tokenizer", tokens=(tokens, 1))


@step(output=Tokenizer, version=1, check=_check)
def train_tokenizer(
    run: StepContext,
    documents: Documents,
    *,
    vocab_size: int,
    tokens: int | None = None,
    pre_tokenizer: Expression = "gpt2",
) -> Result:
    """A byte-level BPE tokenizer of exactly `vocab_size` entries, from at most 2 GiB of text.

    Args:
        documents: the documents, of which only the training split is read.
        vocab_size: number of entries, EOS included.
        tokens: about how many tokens to read, from the files in random order; None for all.
        pre_tokenizer: whose regular expression divides texts into words. A number is one word with
            "gpt2", words of up to three digits with "cl100k" (GPT-4, Llama 3) and "o200k", of two
            with "nanochat" and of one with "qwen2".

    Raises:
        InputError: the text supports fewer entries, or is of 2 GiB or more.
    """
    from data.tokenizer.text_tokenizer import TextTokenizer, train

    check_size(documents, tokens)
    tokenizer_json = train(_texts(run, documents, tokens), vocab_size, pre_tokenizer)
    with run.shard("tokenizer") as directory:
        storage.write_atomic(storage.join(directory, "tokenizer.json"), tokenizer_json)
    tokenizer = TextTokenizer(tokenizer_json)
    return {"vocab_size": tokenizer.vocab_size, "digest": tokenizer.digest}


def check_size(documents: Documents, tokens: int | None) -> None:
    """Raise unless about `tokens` tokens of the training split are few enough to count pairs of."""
    from data.tokenizer.text_tokenizer import MOST_BYTES, check_training_bytes

    split = documents.result["splits"][TRAIN]
    size, counted = split["bytes"], max(1, split["tokens_counted"])
    most = counted * MOST_BYTES // max(1, size)
    read = size * min(tokens or counted, counted) // counted
    check_training_bytes(read, f"pass tokens={most:,} or fewer")


def _texts(run: StepContext, documents: Documents, tokens: int | None) -> Iterator[list[str]]:
    from data.read.parquet_table import read_table

    files = [file for _, file in documents.files(TRAIN)]
    if tokens is not None:
        # A sample is in the order of its source, and the start of a source may not be typical.
        random.Random(0).shuffle(files)
    read = 0
    for index, file in enumerate(files):
        for batch in read_table(file, ("text", "token_count")):
            texts = batch.column("text").to_pylist()
            if tokens is None:
                yield texts
                continue
            before = itertools.accumulate(batch.column("token_count").to_pylist(), initial=read)
            *starts, read = before
            yield [t for t, start in zip(texts, starts, strict=True) if start < tokens]
            if read >= tokens:
                return
        run.progress(index + 1, len(files), "shards read")
