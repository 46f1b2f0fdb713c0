"""Every step of a run that reads a document, by the inverse of the order: no step is walked."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from data.read.listing import absolute
from pipeline.errors import InputError, PonenteError
from steps.rewind.parts import Wanted
from steps.rewind.source import Origin
from training.config.batch_schedule import rows_read, step_that_reads

if TYPE_CHECKING:
    from data.batches.dataset import Piece
    from steps.rewind.batch import Rewinder


@dataclass(frozen=True, kw_only=True)
class Sight:
    """A row of a step's batch with tokens of a document; `first` and `tokens` are as in `InRow`."""

    step: int
    row: int
    first: int
    tokens: int
    part: str
    epoch: int


def trace(rewinder: Rewinder, document: str) -> Iterator[tuple[Origin, list[Sight]]]:
    """Each document that is meant, and where it is seen in the whole schedule, in order.

    `document` is an id, "file:row", or an excerpt of the text. A part of a mixture that cannot be
    searched, as its documents or source are gone, is an error only if no other part has it.
    """
    place = place_of(document)
    ways = [Wanted((document,)), Wanted(words=document)] if place is None else [Wanted(place=place)]
    errors: list[PonenteError | OSError] = []
    for wanted in ways:
        found: list[tuple[int, int, int]] = []
        for source, part in enumerate(rewinder.parts):
            try:
                found += [(source, *each) for each in part.find(wanted)]
            except (PonenteError, OSError) as error:
                errors.append(error)
        for source, shard, number in found:
            (origin,) = rewinder.parts[source].origins(shard, [number])
            yield origin, seen(rewinder, source, shard, number)
        if found:
            return
    if errors:
        raise errors[0]
    raise InputError(
        f"{rewinder.run.path}: none of its training documents is {document!r}; expected an id, "
        "FILE:ROW of a source (rows count from 0), or words of the text as they are in it"
    )


def seen(rewinder: Rewinder, source: int, shard: int, number: int) -> list[Sight]:
    run = rewinder.run
    end, found = rows_read(run.train, run.train.steps), []
    for piece in rewinder.parts[source].pieces(source, shard, number):
        for row, positions in rewinder.dataset.positions(piece, end).items():
            column = _column(rewinder, row, piece)
            _, epochs = rewinder.dataset.origins(positions)
            for position, epoch in zip(positions.tolist(), epochs.tolist(), strict=True):
                found += _sights(rewinder, position, epoch, column, source)
    return sorted(found, key=lambda sight: (sight.step, sight.row, sight.first))


def _column(rewinder: Rewinder, row: int, piece: Piece) -> list[range]:
    """Positions inside a stored row that hold tokens of a piece."""
    found, column = [], 0
    for source, shard, begin, size in rewinder.dataset.pieces(row):
        first, stop = max(begin, piece[2]), min(begin + size, piece[2] + piece[3])
        if (source, shard) == piece[:2] and first < stop:
            found.append(range(column + first - begin, column + stop - begin))
        column += size
    return found


def _sights(
    rewinder: Rewinder, position: int, epoch: int, columns: list[range], source: int
) -> Iterator[Sight]:
    phase, step, row = step_that_reads(rewinder.run.train, position)
    run = rewinder.run.that_did(step)
    if run is not rewinder.run:  # its schedule of batches may have been another one
        phase, step, row = step_that_reads(run.train, position)
    length = rewinder.spec.sequence_length // phase.pieces
    for span in columns:
        for cut in range(span.start // length, (span.stop - 1) // length + 1):
            first = max(span.start, cut * length)
            yield Sight(
                step=step,
                row=row * phase.pieces + cut,
                first=first - cut * length,
                tokens=min(span.stop, (cut + 1) * length) - first,
                part=rewinder.spec.sources[source].name,
                epoch=epoch,
            )


def place_of(document: str) -> tuple[str, int] | None:
    """File and row of "file:row"; None of anything else."""
    file, _, row = document.rpartition(":")
    if not row.isdigit() or not (os.path.isfile(file) or "://" in file):
        return None
    return absolute(file), int(row)
