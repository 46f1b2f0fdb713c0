"""Groups small files into one task, since a task costs more than reading one of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from data.read.unit import Unit

SMALL_BYTES = 4 << 20
TOGETHER_BYTES = 32 << 20
TOGETHER = 1024  # files of one task


def small_together(units: Sequence[Unit]) -> Iterator[tuple[Unit, ...]]:
    """The units in order: neighbours with less than 4 MiB of text each in groups, others alone."""
    found: list[Unit] = []
    size = 0
    for unit in units:
        small = unit.text_bytes < SMALL_BYTES
        full = size + unit.text_bytes > TOGETHER_BYTES or len(found) == TOGETHER
        if found and (full or not small or found[-1].counted != unit.counted):
            yield tuple(found)
            found, size = [], 0
        if small:
            found.append(unit)
            size += unit.text_bytes
        else:
            yield (unit,)
    if found:
        yield tuple(found)
