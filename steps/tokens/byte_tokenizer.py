"""The tokenizer of byte-level models."""

from __future__ import annotations

from pipeline import Result, StepContext, step
from pipeline.store import storage
from steps.artifacts import Tokenizer


@step(output=Tokenizer, version=1)
def byte_tokenizer(run: StepContext) -> Result:
    """A tokenizer of 257 ids: one for each UTF-8 byte, and 256 for EOS. It needs no training."""
    from data.tokenizer.byte_vocabulary import byte_tokenizer_json
    from data.tokenizer.text_tokenizer import TextTokenizer

    content = byte_tokenizer_json()
    with run.shard("tokenizer") as directory:
        storage.write_atomic(storage.join(directory, "tokenizer.json"), content)
    tokenizer = TextTokenizer(content)
    return {"vocab_size": tokenizer.vocab_size, "digest": tokenizer.digest}
