"""Cycles of layers that repeat, without JAX: the loop over layers scans one cycle an iteration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def cycles_of(kinds: Sequence[Any]) -> tuple[int, int]:
    """The layers per cycle and the number of cycles that `kinds` start with.

    Minimizes the blocks in the program: those of one cycle plus the layers after the last cycle.
    """
    count = len(kinds)
    if len(set(kinds)) == 1:  # at once, as any number of layers may be asked for
        return 1, count

    def repeats(period: int) -> int:
        layers = next((i for i in range(count) if kinds[i] != kinds[i % period]), count)
        return layers // period

    choices = ((period, repeats(period)) for period in range(1, count + 1))
    return min(choices, key=lambda choice: (choice[0] + count - choice[0] * choice[1], choice[0]))
