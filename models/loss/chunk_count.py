"""How many chunks the loss is computed in; imports no JAX."""

from __future__ import annotations

import math

LOGIT_BUDGET_BYTES = 512 * 2**20


def chunk_count(
    batch: int, position: int, vocab: int, *, shards: int = 1, budget: int = LOGIT_BUDGET_BYTES
) -> int:
    """Chunks of positions so that one chunk's float32 logits fit `budget` bytes on a device.

    The smallest divisor of `position` that is enough, or `position` where none is.

    Args:
        batch: rows of the whole batch.
        position: tokens per row.
        vocab: ids.
        shards: devices among which the batch is divided evenly.
        budget: bytes per device.
    """
    needed = math.ceil(batch * position * vocab * 4 / shards / budget)
    small = [chunks for chunks in range(1, math.isqrt(position) + 1) if position % chunks == 0]
    divisors = {*small, *(position // chunks for chunks in small)}
    return min((chunks for chunks in divisors if chunks >= needed), default=position)
