"""An order over a token cache: which sequence is read at which position of training.

Nothing is copied. The output is a record of the order (it is a pure function of the seed and the
sizes) and of what was checked: that there is at least one batch's worth of data, that a sample of
the order is what a bijection must be, and how much memory one window of blocks is.
"""

from __future__ import annotations

from pipeline import InputError, Result, StepRun, step
from steps.artifacts import TRAIN, Sequences, TokenCache

_WINDOW_BYTES_WARNING = 4 << 30


@step(output=Sequences, version=1)
def block_shuffle(
    run: StepRun,
    tokens: TokenCache,
    *,
    sequence_length: int,
    io_block_size: int = 64,
    window_blocks: int = 1024,
    seed: int = 0,
) -> Result:
    """Sequences of `sequence_length` tokens, blocks of them shuffled, then sequences in windows."""
    import numpy as np

    from data.order import BlockShuffle

    there = tokens.tokens(TRAIN)
    count = there // sequence_length
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
    window_bytes = min(count, io_block_size * window_blocks) * sequence_length * 2
    if window_bytes > _WINDOW_BYTES_WARNING:
        run.warn(
            f"a shuffle window holds {window_bytes / 2**30:.1f} GiB of tokens; rows are re-read "
            "from storage when the host cannot keep that much: lower window_blocks or io_block_size"
        )
    return {
        "sequence_length": sequence_length,
        "sequences": count,
        "tokens_used": count * sequence_length,
        "tokens_left_over": there - count * sequence_length,
        "io_block_size": io_block_size,
        "window_blocks": window_blocks,
        "window_bytes": window_bytes,
        "seed": seed,
    }
