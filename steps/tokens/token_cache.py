"""Tokenise documents into a TensorStore cache; each task tokenises one row group."""

from __future__ import annotations

import functools
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pipeline import InputError, Result, Runtime, StepContext, step
from pipeline.store import storage
from pipeline.store.parallel import concurrently, in_order
from pipeline.store.shards import Shard
from steps.artifacts import Documents, TokenCache, Tokenizer
from steps.documents.items import DocumentSource, forget
from steps.documents.sample import sampled

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

_SHARD_MEMORY = 512 * 2**20  # a row group of 16 MiB takes 260 MiB, with its process
_OCCURRENCES = "occurrences.npz"
_COMPARED = 8  # most row groups of which the encoders are compared


@dataclass(frozen=True, kw_only=True)
class DocumentGroup:
    """The documents that one task tokenises: a row group of a file that `sample` wrote."""

    file: str
    row_group: int
    tokenizer: str  # URL of the tokenizer.json
    digest: str  # its SHA-256
    backend: Literal["auto", "tokenizers", "fastokens"]  # see `data/tokenizer/backends.py`


@step(output=TokenCache, version=2, cpus=0, shard_memory=_SHARD_MEMORY, then=sampled)
def tokenize(
    run: StepContext,
    documents: DocumentSource,
    tokenizer: Tokenizer,
    *,
    backend: Annotated[Literal["auto", "tokenizers", "fastokens"], Runtime] = "auto",
) -> Result:
    """Every split of the documents as token ids, with EOS after each document and no other token.

    Args:
        documents: documents, or a source of which all are taken.
        tokenizer: the tokenizer.
        backend: "auto" is fastokens if it is installed and known to read this tokenizer. Every
            backend gives the ids of tokenizers: documents are compared first, and tokenizers
            encodes everything if one differs.
    """
    assert isinstance(documents, Documents)  # see `sampled`
    text_tokenizer = tokenizer.load()
    fast = text_tokenizer.checked(backend).is_fast  # refuses an unavailable backend
    write_vocabulary(run, text_tokenizer.token_bytes.tolist())
    items = {
        name: DocumentGroup(
            file=file,
            row_group=row_group,
            tokenizer=tokenizer.file,
            digest=text_tokenizer.digest,
            backend=backend,
        )
        for name, (file, row_group) in _row_groups(documents).items()
    }
    compared = 0
    if fast and items:
        some = tuple(items.values())[:: -(-len(items) // _COMPARED)]
        (checked,) = run.map(check_shard, {"comparison": some}).values()
        compared = checked.result["documents"]
        if difference := checked.result["difference"]:
            run.warn(f"{difference}: tokenizers encodes all documents instead of {backend!r}")
            items = {name: replace(item, backend="tokenizers") for name, item in items.items()}
    written = list(run.map(tokenize_shard, items).values())
    splits = {
        split: [s for s in written if s.name.startswith(f"{split}/")] for split in documents.splits
    }
    forget(run, "comparison")
    return {
        "vocab_size": text_tokenizer.vocab_size,
        "eos_id": text_tokenizer.eos_id,
        "tokenizer": text_tokenizer.digest,
        "splits": {
            split: _summary(run, parts, documents.result["splits"][split]["tokens_asked"])
            for split, parts in splits.items()
            if parts
        },
        "measured": {**_measured(written), "documents_checked": compared},
    }


def tokenize_shard(directory: str, item: DocumentGroup) -> Mapping[str, Any]:
    """Shard writer: the token cache of one row group, and how often each id occurs."""
    import time

    import numpy as np

    from data.cache.token_shard import write_shard
    from data.read.values import text_offsets
    from data.tokenizer.text_tokenizer import TextTokenizer

    clock, cpu = time.monotonic(), time.process_time()
    parallel = os.environ.get("OMP_NUM_THREADS") != "1"  # which Ray sets for tasks of one core
    one_thread = None if parallel else False  # None leaves the choice to the environment
    tokenizer = TextTokenizer.load_once(item.tokenizer, item.digest, parallel=one_thread)
    texts = _texts(item)
    size = sum(int(np.ptp(text_offsets(array)[[0, -1]])) for array in texts)
    encoder = tokenizer.checked(item.backend, parallel=parallel)
    written = write_shard(
        storage.join(directory, "cache"),
        tokenizer.encode_documents(texts, encoder),
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        bos_id=tokenizer.bos_id,
        tokenizer_digest=tokenizer.digest,
    )
    _save_occurrences(directory, written.counts)
    return {
        "tokens": written.tokens,
        "documents": written.documents,
        "bytes": size,
        "content": written.digest,
        "check": written.check,
        "measured": {
            "seconds": time.monotonic() - clock,
            "cpu_seconds": time.process_time() - cpu,
            **encoder.record(),
        },
    }


def check_shard(directory: str, items: Sequence[DocumentGroup]) -> Mapping[str, Any]:
    """Shard writer: compares the encoders on documents of some row groups; writes no file."""
    from data.tokenizer.backends import to_compare
    from data.tokenizer.text_tokenizer import TextTokenizer

    del directory
    documents = 0
    tokenizer = TextTokenizer.load_once(items[0].tokenizer, items[0].digest)
    encoder = tokenizer.checked(items[0].backend)
    for item in items:
        texts = to_compare(_texts(item)[0])
        documents += len(texts)
        encoder.check(texts)
    return {"documents": documents, "difference": encoder.difference, "content": None}


def _texts(item: DocumentGroup) -> list[pa.Array]:
    """The documents' texts, as Arrow arrays."""
    import pyarrow as pa

    from data.read.parquet_table import read_table

    batches = read_table(item.file, ("text",), (item.row_group,))
    texts = [batch.column("text") for batch in batches]
    for array in texts:
        try:
            array.validate(full=True)  # Parquet readers accept any bytes as a string
        except pa.ArrowInvalid as error:
            raise InputError(
                f"{item.file}, row group {item.row_group}: expected texts in UTF-8, found {error}; "
                "repair the document in the source, or leave it out"
            ) from error
    return texts


def _row_groups(documents: Documents) -> dict[str, tuple[str, int]]:
    """(file, row group) of every shard, by the name of the shard."""
    from data.read.parquet_table import count_row_groups

    files = [
        (f"{split}/{name.rpartition('/')[2]}", file)
        for split in documents.splits
        for name, file in documents.files(split)
    ]
    counts = concurrently(count_row_groups, [file for _, file in files], documents.home)
    return {
        f"{name}/{row_group:04d}": (file, row_group)
        for (name, file), count in zip(files, counts, strict=True)
        for row_group in range(count)
    }


def _summary(run: StepContext, parts: Sequence[Shard], asked: int) -> dict[str, Any]:
    """Statistics of a split; `error` is the relative difference of its `tokens` from `asked`."""
    tokens = sum(shard.result["tokens"] for shard in parts)
    size = sum(shard.result["bytes"] for shard in parts)
    return {
        "tokens": tokens,
        "documents": sum(shard.result["documents"] for shard in parts),
        "bytes": size,
        "tokens_asked": asked,
        "error": tokens / asked - 1 if asked > 0 else None,
        "tokens_per_byte": tokens / size if size else None,
        "unigram_entropy": entropy(run, parts),
    }


def write_vocabulary(run: StepContext, token_bytes: list[int], **files: str) -> None:
    """Write the bytes of text that each id stands for, and some files by name."""
    contents = {"token_bytes.json": json.dumps(token_bytes), **files}
    with run.shard("vocabulary") as directory:
        for name, content in contents.items():
            storage.write_atomic(storage.join(directory, name), content.encode())


def write_rows(
    directory: str, rows: Iterable[np.ndarray], vocab_size: int, bands: int, digest: str = ""
) -> dict[str, Any]:
    """Write the cache of batches of rows, int64 [row, length]; the entries of the shard's result.

    An id below `vocab_size` is predicted; one of the other `bands` of so many ids stands for such
    an id that is not.
    """
    import numpy as np

    from data.cache.token_shard import write_shard

    written = write_shard(
        storage.join(directory, "cache"),
        ((batch.reshape(-1), np.full(len(batch), batch.shape[1])) for batch in rows),
        vocab_size=bands * vocab_size,
        eos_id=None,
        tokenizer_digest=digest,
    )
    predicted = written.counts[:vocab_size]
    _save_occurrences(directory, predicted)
    return {
        "tokens": written.tokens,
        "rows": written.documents,
        "predicted": int(predicted.sum()),
        "content": written.digest,
        "check": written.check,
    }


def _save_occurrences(directory: str, counts: np.ndarray) -> None:
    import numpy as np

    with storage.open_write(storage.join(directory, _OCCURRENCES)) as out:
        np.savez_compressed(out, occurrences=counts)


def entropy(run: StepContext, parts: Sequence[Shard]) -> float:
    """The unigram entropy of the ids that count in these shards, in nats."""
    import numpy as np

    from data.cache.token_shard import unigram_entropy

    def load(shard: Shard) -> np.ndarray:
        with storage.open_read(storage.join(run.root, shard.root, _OCCURRENCES)) as file:
            return np.load(file, allow_pickle=False)["occurrences"]

    return unigram_entropy(functools.reduce(np.add, in_order(load, parts, run.root)))


def _measured(written: Sequence[Shard]) -> dict[str, Any]:
    """Shards by backend, and the cost: properties of this run and not of the tokens."""
    shards = [shard.result["measured"] for shard in written]
    backends = Counter(f"{shard['backend']} {shard['version']}" for shard in shards)
    return {
        "cpu_seconds": sum(shard["cpu_seconds"] for shard in shards),
        "shards_by_backend": dict(sorted(backends.items())),
        "shards_fell_back": sum(shard["fell_back"] for shard in shards),
    }
