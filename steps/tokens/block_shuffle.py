"""The order of training over a token cache: which sequence is read at which data offset.

Nothing is copied. The output records the order, which is a pure function of the seed and the sizes.
The step checks that there is at least one sequence, and that the first window repeats none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from models.shape.validation import at_least
from pipeline import InputError, Result, Runtime, StepContext, step
from steps.artifacts import TRAIN, Documents, Sequences, TokenCache
from steps.declared import nearest_setting

_MOST_TOKENS = 8  # most tokens of any tokenizer per token of a source's count, maybe bytes / 4
_WIDEST_TOKEN = 4  # bytes of an id; 2 where the vocabulary has at most 65,536 ids


def advise(settings: Mapping[str, Any]) -> list[str]:
    """The advice that `plan` shows if a shuffle window is larger than the host's memory budget."""
    sequences = settings["io_block_size"] * settings["window_blocks"]
    window = sequences * settings["sequence_length"] * _WIDEST_TOKEN
    budget = settings["host_memory"]
    if window <= budget:
        return []
    return [
        f"a shuffle window of {settings['window_blocks']:,} blocks of {settings['io_block_size']} "
        f"sequences holds up to {window / 2**30:.1f} GiB of tokens, more than host_memory of "
        f"{budget / 2**30:.1f} GiB: the page cache cannot hold the window, and every sequence "
        "needs its own read from storage; lower window_blocks or io_block_size, or raise "
        "host_memory to what hosts can spare"
    ]


def _check(arguments: Mapping[str, Any]) -> None:
    length, packed = (
        arguments["sequence_length"],
        nearest_setting(arguments["tokens"], "sequence_length"),
    )
    if packed not in (None, length):
        raise InputError(
            f"block_shuffle: sequence_length {length:,}: its tokens are packed into rows of "
            f"{packed:,}; give both steps the same length"
        )
    budget = nearest_setting(arguments["tokens"], "tokens", Documents)
    if budget is not None and 0 < _MOST_TOKENS * budget < length:
        raise InputError(
            f"block_shuffle: sequence_length {length:,} is longer than the {budget:,} tokens that "
            "sample has as its budget; sample more tokens or shorten the sequence"
        )
    names = ("sequence_length", "io_block_size", "window_blocks")
    at_least("block_shuffle", **{name: (arguments[name], 1) for name in names})


@step(output=Sequences, version=2, advise=advise, check=_check)
def block_shuffle(
    run: StepContext,
    tokens: TokenCache,
    sequence_length: int,
    *,
    io_block_size: int = 64,
    window_blocks: int = 1024,
    seed: int = 0,
    host_memory: Annotated[int, Runtime] = 4 << 30,
) -> Result:
    """Sequences of `sequence_length` tokens: blocks are shuffled, then sequences within windows.

    Args:
        tokens: the token cache; a packed one must be packed for this `sequence_length`.
        sequence_length: tokens of a sequence.
        io_block_size: neighbouring sequences of a block, which the first shuffle keeps together,
            see `data.batches.block_shuffle`.
        window_blocks: blocks of a window, in which the second shuffle mixes all sequences.
        seed: another seed gives another order.
        host_memory: bytes of a window that a host can cache; `plan` warns if a window is larger.
    """
    import numpy as np

    from data.batches.block_shuffle import BlockShuffle
    from data.batches.sequences import row_count

    packed = tokens.result.get("sequence_length", sequence_length)
    if packed != sequence_length:
        raise InputError(
            f"sequence_length {sequence_length:,}: {tokens.path} is packed into rows of {packed:,} "
            "tokens; shuffle with that length or pack again"
        )
    available = tokens.tokens(TRAIN)
    count = row_count([available], sequence_length)
    if count == 0:
        raise InputError(
            f"sequence_length {sequence_length:,} is longer than the data: {tokens.path} has "
            f"{available:,} training tokens; sample more tokens or shorten the sequence"
        )
    order = BlockShuffle(
        sequences=count, io_block_size=io_block_size, window_blocks=window_blocks, seed=seed
    )
    first = order.rows(np.arange(min(count, io_block_size * window_blocks)))
    if len(np.unique(first)) != len(first):
        raise AssertionError(f"{order}: the first window repeats a sequence")
    return {
        "sequence_length": sequence_length,
        "sequences": count,
        "tokens_used": count * sequence_length,
        "tokens_left_over": available - count * sequence_length,
        "io_block_size": io_block_size,
        "window_blocks": window_blocks,
        "seed": seed,
    }
