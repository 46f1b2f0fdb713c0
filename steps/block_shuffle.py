"""An order over a token cache: which sequence is read at which position of training.

Nothing is copied. The output is a record of the order (it is a pure function of the seed and the
sizes) and of what was checked: that there is at least one sequence, and that a sample of the order
is what a bijection must be.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pipeline import InputError, Result, Runtime, StepContext, step
from steps.artifacts import TRAIN, Documents, Sequences, TokenCache
from steps.declared import asked
from training.config.validation import at_least

_MOST_TOKENS = 8  # of a tokenizer here for one by a source's count, which may be bytes / 4
_WIDEST_TOKEN = 4  # bytes; half of it where the vocabulary has at most 65,536 ids


def advise(settings: Mapping[str, Any]) -> list[str]:
    """What `plan` says of a shuffle window that the host's memory cannot keep."""
    sequences = settings["io_block_size"] * settings["window_blocks"]
    window = sequences * settings["sequence_length"] * _WIDEST_TOKEN
    budget = settings["host_memory"]
    if window <= budget:
        return []
    return [
        f"a shuffle window of {settings['window_blocks']:,} blocks of {settings['io_block_size']} "
        f"sequences holds up to {window / 2**30:.1f} GiB of tokens, more than host_memory of "
        f"{budget / 2**30:.1f} GiB: what is next in it cannot wait in the page cache, and every "
        "sequence is fetched from storage on its own; lower window_blocks or io_block_size, or "
        "raise host_memory to what hosts can spare"
    ]


def _check(arguments: Mapping[str, Any]) -> None:
    length, packed = arguments["sequence_length"], asked(arguments["tokens"], "sequence_length")
    if packed not in (None, length):
        raise InputError(
            f"block_shuffle: sequence_length {length:,}: its tokens are packed into rows of "
            f"{packed:,}; give both steps the same length"
        )
    budget = asked(arguments["tokens"], "tokens", Documents)
    if budget is not None and 0 < _MOST_TOKENS * budget < length:
        raise InputError(
            f"block_shuffle: sequence_length {length:,} is longer than the {budget:,} tokens that "
            "sample is asked for; sample more tokens or shorten the sequence"
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
    """Sequences of `sequence_length` tokens, blocks of them shuffled, then sequences in windows.

    Args:
        run: the attempt.
        tokens: the token cache; a packed one must be packed for this `sequence_length`.
        sequence_length: tokens in a sequence.
        io_block_size: neighbouring sequences that are shuffled as one, see
            `data.batches.block_shuffle`.
        window_blocks: blocks whose sequences are shuffled among each other.
        seed: another seed is another order.
        host_memory: bytes a host can keep of a window; `plan` warns when a window is larger.
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
    there = tokens.tokens(TRAIN)
    count = row_count([there], sequence_length)
    if count == 0:
        raise InputError(
            f"sequence_length {sequence_length:,} is longer than the data: {tokens.path} has "
            f"{there:,} training tokens; sample more tokens or shorten the sequence"
        )
    order = BlockShuffle(
        sequences=count, io_block_size=io_block_size, window_blocks=window_blocks, seed=seed
    )
    first = order.rows(np.arange(min(count, io_block_size * window_blocks)))
    if len(np.unique(first)) != len(first):
        raise AssertionError(f"{order}: a row came twice in the first window")
    return {
        "sequence_length": sequence_length,
        "sequences": count,
        "tokens_used": count * sequence_length,
        "tokens_left_over": there - count * sequence_length,
        "io_block_size": io_block_size,
        "window_blocks": window_blocks,
        "seed": seed,
    }
