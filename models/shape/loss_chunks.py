"""The number of chunks in which the loss is computed; imports no JAX."""

from __future__ import annotations

import math

from pipeline.errors import InputError

LOGIT_BUDGET_BYTES = 512 * 2**20
CPU_LOGIT_BUDGET_BYTES = 16 * 2**20  # nearer to the size of its caches


def logit_budget(platform: str) -> int:
    """Bytes for the float32 logits of one chunk on a device of "tpu", "gpu" or "cpu"."""
    return CPU_LOGIT_BUDGET_BYTES if platform == "cpu" else LOGIT_BUDGET_BYTES


def check_chunks(position: int, chunks: int) -> None:
    """Raise `InputError` unless `chunks` divides the positions of a sequence on one device."""
    if position % chunks:
        raise InputError(
            f"loss chunks: expected a divisor of the {position} positions of a sequence on one "
            f'device, found {chunks}; give another number, or "auto" as TrainConfig.loss_chunks'
        )


def chunk_count(
    batch: int, position: int, vocab: int, *, shards: int = 1, budget: int = LOGIT_BUDGET_BYTES
) -> int:
    """The number of chunks of positions whose float32 logits fit `budget` bytes on a device each.

    The smallest sufficient divisor of `position`, or `position` where no divisor is sufficient;
    `shards` devices divide the batch evenly.
    """
    needed = math.ceil(batch * position * vocab * 4 / shards / budget)
    small = [chunks for chunks in range(1, math.isqrt(position) + 1) if position % chunks == 0]
    divisors = {*small, *(position // chunks for chunks in small)}
    return min((chunks for chunks in divisors if chunks >= needed), default=position)
