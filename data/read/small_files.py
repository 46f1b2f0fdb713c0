"""Groups small files, since a task or a batch costs more than reading one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from data.read.unit import Unit

SMALL_BYTES = 4 << 20
TOGETHER_BYTES = 32 << 20
TOGETHER = 1024  # files of one task


def small_together(units: Iterable[Unit]) -> Iterator[tuple[Unit, ...]]:
    """The units in order: neighbours with less than 4 MiB of text each in groups, others alone."""
    return grouped(units, lambda unit: unit.text_bytes < SMALL_BYTES, TOGETHER, TOGETHER_BYTES)


def grouped(
    units: Iterable[Unit], joins: Callable[[Unit], bool], most_units: int, most_bytes: int
) -> Iterator[tuple[Unit, ...]]:
    """The units in order: neighbours for which `joins` in groups, every other unit alone.

    The units of a group all have a `token_count`, or none of them has.
    """
    found: list[Unit] = []
    size = 0
    for unit in units:
        joined = joins(unit)
        full = len(found) == most_units or size + unit.text_bytes > most_bytes
        if found and (full or not joined or found[-1].counted != unit.counted):
            yield tuple(found)
            found, size = [], 0
        if joined:
            found.append(unit)
            size += unit.text_bytes
        else:
            yield (unit,)
    if found:
        yield tuple(found)
