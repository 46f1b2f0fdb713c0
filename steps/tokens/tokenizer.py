"""Tokenizers: an existing tokenizer.json, one trained on a sample, or one of bytes."""

from __future__ import annotations

import itertools
import math
import os
import random
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, get_args

from data.read.listing import absolute, list_source
from data.tokenizer.special_tokens import EOS, check_vocab_size
from models.shape.validation import at_least
from pipeline import External, InputError, Result, StepContext, step
from pipeline.store import storage
from steps.artifacts import TRAIN, Documents, Tokenizer
from steps.documents.items import DocumentSource
from steps.documents.sample import sampled
from steps.gang import HUB

if TYPE_CHECKING:
    from data.tokenizer.text_tokenizer import TextTokenizer

_FILE = "tokenizer.json"
_MOST_BYTES = 256 << 20
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")
Expression: TypeAlias = Literal["gpt2", "cl100k", "nanochat", "qwen2", "o200k"]
"""Names of `data.tokenizer.expressions.EXPRESSIONS`."""


def _place(source: Any) -> Any:
    """URL of the tokenizer.json that `source` names."""
    if not isinstance(source, str) or not source:
        return source
    if storage.is_local(source):
        path = storage.local_path(source)
        hub_id = _HUB_ID.fullmatch(source) and source[0] != "." and not source.endswith(".json")
        if hub_id and not os.path.lexists(path):
            source = f"hf://{source}"
        else:
            return os.path.join(path, _FILE) if os.path.isdir(path) else absolute(source)
    return source if source.endswith(".json") else f"{source.rstrip('/')}/{_FILE}"


def _check(arguments: Mapping[str, Any]) -> None:
    size = arguments["vocab_size"]
    if size is not None and size < 1:
        raise InputError(f"tokenizer: vocab_size={size}: expected at least 1; leave it out")


@step(output=Tokenizer, version=3, cpus=0, check=_check, environment=HUB)
def tokenizer(
    run: StepContext,
    source: Annotated[str, External(list_source, _place)],
    *,
    eos: str | None = None,
    bos: str | None = None,
    vocab_size: int | None = None,
    lossy: bool = False,
) -> Result:
    """An existing tokenizer.json, tested for a lossless round trip of difficult texts.

    Args:
        source: a file, or a folder with a tokenizer.json: local, `gs://`, `https://`, or
            `hf://owner/name@<commit>`; a hub id `owner/name` if no such file exists. The key
            depends on the file's contents and not on its URL.
        eos: name of the token that ends a document; None to look for well-known names.
        bos: name of the token that begins one, where the file's post-processor inserts no other
            one; None for the one that it inserts, or without it EOS.
        vocab_size: size of a vocabulary that is padded beyond the tokenizer's entries.
        lossy: accept a tokenizer that changes or loses text, such as WordPiece. Bits per byte are
            then approximate.

    Raises:
        InputError: there is no tokenizer.json, it changes or loses text, its EOS is unknown, or
            its post-processor inserts another token than `bos`.
    """
    from data.read.byte_ranges import file_state, open_ranges
    from data.tokenizer.text_tokenizer import TextTokenizer
    from data.tokenizer.tokenizer_file import with_fields

    state = file_state(source)
    if state.size > _MOST_BYTES:
        raise InputError(f"{source}: expected a tokenizer.json, found {state.size:,} bytes")
    with open_ranges(source, state) as file:
        content = file.read()
    try:
        content = with_fields(
            content, eos_token=eos, bos_token=bos, vocab_size=vocab_size, lossy=lossy
        )
        loaded = TextTokenizer(content)
        if bos is not None:
            _check_bos(bos, content, loaded)
    except InputError as error:
        raise InputError(f"{source}: {error}") from None
    return {
        **_write(run, content, loaded),
        "eos_id": loaded.eos_id,
        "bos_id": loaded.bos_id,
        "headline": [
            f"{loaded.vocab_size:,} ids, a document begins with {_shown(loaded, loaded.bos_id)} "
            f"and ends with {_shown(loaded, loaded.eos_id)}"
        ],
    }


def _check_bos(name: str, content: bytes, loaded: TextTokenizer) -> None:
    """Raise unless a document begins with the token that was named to begin it."""
    from data.tokenizer.tokenizer_file import parse

    ids = {token["content"]: token["id"] for token in parse(content)["added_tokens"]}
    if ids[name] != loaded.bos_id:
        raise InputError(
            f"tokenizer.json: bos={name!r}: its post-processor puts "
            f"{_shown(loaded, loaded.bos_id)} before a text; leave bos out, or set post_processor "
            "to null"
        )


def _shown(loaded: TextTokenizer, index: int) -> str:
    return f"{loaded.decode([index])!r} ({index})"


def _check_trained(arguments: Mapping[str, Any]) -> None:
    check_vocab_size(arguments["vocab_size"])
    if (name := arguments["pre_tokenizer"]) not in get_args(Expression):
        raise InputError(
            f"train_tokenizer.pre_tokenizer: expected one of {', '.join(get_args(Expression))}, "
            f"found {name!r}"
        )
    names = arguments["special_tokens"]
    if EOS in names or len(set(names)) < len(names) or not all(map(str.strip, names)):
        raise InputError(
            f"train_tokenizer.special_tokens: expected different names other than {EOS}, which it "
            f"has in any case, found {names}"
        )
    if (tokens := arguments["tokens"]) is not None:
        at_least("train_tokenizer", tokens=(tokens, 1))


@step(output=Tokenizer, version=1, check=_check_trained, then=sampled)
def train_tokenizer(
    run: StepContext,
    documents: DocumentSource,
    *,
    vocab_size: int,
    tokens: int | None = None,
    pre_tokenizer: Expression = "gpt2",
    special_tokens: tuple[str, ...] = (),
) -> Result:
    """A byte-level BPE tokenizer of exactly `vocab_size` entries, from at most 2 GiB of text.

    Args:
        documents: documents, or a source, of which only the training split is read.
        vocab_size: number of entries, EOS included.
        tokens: about how many tokens to read, from the files in random order; None for all.
        pre_tokenizer: whose regular expression divides texts into words. A number is one word with
            "gpt2", words of up to three digits with "cl100k" (GPT-4, Llama 3) and "o200k", of two
            with "nanochat" and of one with "qwen2".
        special_tokens: special tokens beside EOS, such as those that a chat template names.

    Raises:
        InputError: the text supports fewer entries, or is of 2 GiB or more.
    """
    from data.tokenizer.text_tokenizer import TextTokenizer, train

    assert isinstance(documents, Documents)  # see `sampled`
    check_size(documents, tokens)
    content = train(_texts(run, documents, tokens), vocab_size, pre_tokenizer, special_tokens)
    return _write(run, content, TextTokenizer(content))


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

    files, most = [file for _, file in documents.files(TRAIN)], math.inf
    if tokens is not None:
        most = tokens
        # A sample is in the order of its source, and the start of a source may not be typical.
        random.Random(0).shuffle(files)
    read = 0
    for index, file in enumerate(files):
        for batch in read_table(file, ("text", "token_count")):
            texts, counts = (batch.column(n).to_pylist() for n in ("text", "token_count"))
            *starts, read = itertools.accumulate(counts, initial=read)
            yield [t for t, start in zip(texts, starts, strict=True) if start < most]
            if read >= most:
                return
        run.progress(index + 1, len(files), "shards read")


@step(output=Tokenizer, version=1)
def byte_tokenizer(run: StepContext) -> Result:
    """A tokenizer of 257 ids: one for each UTF-8 byte, and 256 for EOS. It needs no training."""
    from data.tokenizer.byte_vocabulary import byte_tokenizer_json
    from data.tokenizer.text_tokenizer import TextTokenizer

    content = byte_tokenizer_json()
    return _write(run, content, TextTokenizer(content))


def _write(run: StepContext, content: bytes, loaded: TextTokenizer) -> Result:
    with run.shard("tokenizer") as directory:
        storage.write_atomic(storage.join(directory, _FILE), content)
    return {"vocab_size": loaded.vocab_size, "digest": loaded.digest}
