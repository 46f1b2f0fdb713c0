"""Pack training documents into sequences and cut only those that are longer; no shuffling.

The output is a new token cache of the training tokens, whose shards hold whole sequences.
Evaluations read held-out tokens as one stream, so these stay in the unpacked cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pipeline import InputError, Result, StepContext, step
from pipeline.store import storage
from steps.artifacts import TRAIN, TokenCache

if TYPE_CHECKING:
    from data.cache.token_shard import TokenShard

_COUNTED = (
    *("rows", "rows_with_eos_in_front", "tokens_packed"),
    *("documents", "documents_cut", "documents_cut_by_joining"),
)
_ROWS = ("pack", "conversations", "integer_rows")  # steps whose caches hold rows


def _check(arguments: Mapping[str, Any]) -> None:
    if (length := arguments["sequence_length"]) < 2:
        raise InputError(f"sequence_length={length}: expected at least 2; give more")
    if (made := arguments["tokens"].step.name) in _ROWS:
        raise InputError(
            f"pack: expected documents, found the rows that `{made}` makes; pack the cache that "
            "`tokenize` writes, or leave pack out"
        )


@step(output=TokenCache, version=2, cpus=0, check=_check)
def pack(run: StepContext, tokens: TokenCache, *, sequence_length: int) -> Result:
    """Best-fit packing of every training shard into sequences of `sequence_length` tokens.

    Only a document longer than a sequence is cut. A sequence that begins with the start of a
    document has an EOS in front of it. Where no document fits the rest of a sequence, it is padded
    with EOS. The result has the cost, compared with joining all documents and cutting
    every `sequence_length` tokens (`documents_cut_by_joining`) and with next-fit packing in the
    order of the documents (`padding_share_of_next_fit`).
    """
    if "sequence_length" in tokens.result:
        raise InputError(
            f"{tokens.path}: expected documents, found rows of "
            f"{tokens.result['sequence_length']} tokens; pack the cache that `tokenize` wrote"
        )
    about = {name: tokens.result[name] for name in ("vocab_size", "eos_id", "tokenizer")}
    names = [shard.name for shard in tokens.shards(f"{TRAIN}/")]
    shards = [(shard, sequence_length, about) for shard in tokens.split(TRAIN)]
    written = run.map(pack_shard, dict(zip(names, shards, strict=True)))
    parts = [shard.result for shard in written.values()]
    total = {name: sum(part[name] for part in parts) for name in _COUNTED}
    if not total["rows"]:
        raise InputError(f"{tokens.path}: found no training tokens to pack; sample some documents")
    next_fit = sum(part["rows_of_next_fit"] for part in parts) * sequence_length
    capacity = total["rows"] * sequence_length
    filled = total["tokens_packed"] + total["rows_with_eos_in_front"]
    return {
        **about,
        **total,
        "sequence_length": sequence_length,
        "padding_tokens": capacity - filled,
        "padding_share": 1 - filled / capacity,
        "padding_share_of_next_fit": 1 - filled / next_fit,
        "splits": tokens.result["splits"],
        "measured": {"cpu_seconds": sum(part["measured"]["cpu_seconds"] for part in parts)},
    }


def pack_shard(
    directory: str, item: tuple[TokenShard, int, Mapping[str, Any]]
) -> Mapping[str, Any]:
    """Shard writer: the packed sequences of one shard's documents, of a cache `about`."""
    import time

    import numpy as np

    from data.batches import packing
    from data.cache.token_array import TokenArray
    from data.cache.token_shard import read_offsets, write_shard

    clock, cpu = time.monotonic(), time.process_time()
    shard, length, about = item
    eos_id, size, digest = about["eos_id"], about["vocab_size"], about["tokenizer"]
    offsets = read_offsets(shard.directory, shard.check)
    with TokenArray([shard], size, tokenizer_digest=digest) as array:
        stream = array.read(np.zeros(1, np.int64), shard.tokens)[0]
    laid = packing.pack(offsets, length)
    rows = packing.fill(laid, stream, length, eos_id).reshape(-1)
    # Rows end with EOS, so their tokens are documents again, and each padding EOS an empty one.
    is_eos = rows == eos_id
    sizes = np.diff(np.flatnonzero(is_eos), prepend=-1) - 1
    written = write_shard(
        storage.join(directory, "cache"),
        [(rows[~is_eos], sizes)],
        vocab_size=size,
        eos_id=eos_id,
        tokenizer_digest=digest,
    )
    return {
        "tokens": written.tokens,
        "tokens_packed": len(stream),
        "rows": laid.row_count,
        "rows_with_eos_in_front": laid.fronts,
        "documents": len(offsets) - 1,
        "documents_cut": packing.documents_cut_by_packing(offsets, length),
        "documents_cut_by_joining": packing.documents_cut_by_joining(offsets, length),
        "rows_of_next_fit": packing.rows_of_next_fit(offsets, length),
        "content": written.digest,
        "check": written.check,
        "measured": {
            "seconds": time.monotonic() - clock,
            "cpu_seconds": time.process_time() - cpu,
        },
    }
