"""The same order of training without some documents, from a point on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from models.shape.validation import at_least
from pipeline import InputError, Result, StepContext, step
from steps.artifacts import Sequences

if TYPE_CHECKING:
    import numpy as np

    from data.batches.dataset import Dataset
    from steps.rewind.parts import Part

_BLOCK = 1024  # positions that are looked at together


def _check(arguments: Mapping[str, Any]) -> None:
    start, end = arguments["start"], arguments["end"]
    at_least("without", start=(start, 0), end=(end, start + 1))
    if not arguments["documents"]:
        raise InputError("without: expected documents to leave out, found none; give their ids")


@step(output=Sequences, version=2, check=_check)
def without(
    run: StepContext, order: Sequences, *, documents: tuple[str, ...], start: int, end: int
) -> Result:
    """The sequences of `order` without some documents, for `extend` from a checkpoint before them.

    A sequence that has any of a document's tokens is replaced, from `start` to `end`: by the first
    ones after `end` that have none. All others stay where they are. In a mixture they are of the
    same part, or of any if the last phase does not read it.

    Args:
        documents: ids, or "FILE:ROW" of a source, counted from 0.
        start: sequences that the checkpoint has read.
        end: sequences that the whole run reads.
    """
    import numpy as np

    from data.batches.dataset import Dataset
    from steps.rewind.parts import part_of

    parts = [part_of(each.cache) for each in order.parts or [order]]
    spec = order.dataset()
    with Dataset(spec) as dataset:
        read = _read(dataset, parts, documents, end)
        moved = sorted({at for positions in read.values() for at in positions if at >= start})
        free = max([end, *(other + 1 for _, other in spec.moved)])
        others = _others(dataset, np.array([*read], np.int64), free, np.array(moved, np.int64))
    if not moved:
        run.warn(f"no sequence from {start:,} to {end:,} has any of the documents")
    pairs = {**dict(spec.moved), **others}
    return {
        **order.result,
        "moved": [list(pair) for pair in sorted(pairs.items())],
        "end": end,
        "headline": [f"{len(moved):,} of {end - start:,} sequences replaced"],
    }


def _read(
    dataset: Dataset, parts: Sequence[Part], documents: Sequence[str], end: int
) -> dict[int, list[int]]:
    """By row with any of the documents, the positions before `end` that read it."""
    from steps.rewind.parts import Wanted
    from steps.rewind.sights import place_of

    places = {each: place for each in documents if (place := place_of(each)) is not None}
    wanted: dict[str, Wanted] = {each: Wanted(place=place) for each, place in places.items()}
    wanted[""] = Wanted(tuple(each for each in documents if each not in places))
    left, found = set(documents), dict[int, list[int]]()
    for source, part in enumerate(parts):
        for name, one in wanted.items():
            for shard, number in part.find(one):
                (origin,) = part.origins(shard, [number])
                left -= {name, origin.id or ""}
                for piece in part.pieces(source, shard, number):
                    rows = dataset.positions(piece, end)
                    found |= {row: positions.tolist() for row, positions in rows.items()}
    if left:
        raise InputError(
            f"without: no training document is {min(left)!r}; give ids, or FILE:ROW of a source"
        )
    return found


def _others(dataset: Dataset, rows: np.ndarray, end: int, moved: np.ndarray) -> dict[int, int]:
    """By moved position, one of the first from `end` on that read none of `rows`."""
    import numpy as np

    sources, found = dataset.origins(moved)[0], dict[int, int]()
    phases = dataset.spec.phases
    weights = phases[-1].weights if phases else (1.0,) * len(dataset.spec.sources)
    for source in sorted(np.unique(sources).tolist(), key=lambda each: weights[each] == 0):
        of = (source,) if weights[source] else range(len(weights))
        begin = end if weights[source] else max([end, *(used + 1 for used in found.values())])
        mine = moved[sources == source].tolist()
        found |= dict(zip(mine, _clean(dataset, rows, begin, of), strict=False))
    return found


def _clean(dataset: Dataset, rows: np.ndarray, begin: int, of: Sequence[int]) -> Iterator[int]:
    """The positions from `begin` on that read some sources and none of `rows`.

    Raises `InputError` if a whole epoch has none.
    """
    import numpy as np

    first, found = None, False
    for block in itertools.count(begin, _BLOCK):
        positions = np.arange(block, block + _BLOCK)
        sources, epochs = dataset.origins(positions)
        mine = np.isin(sources, of)
        clean = positions[mine & ~np.isin(dataset.rows(positions), rows)]
        yield from clean.tolist()
        found = found or len(clean) > 0
        if found or not mine.any():
            continue
        epoch = int(epochs[mine].min())
        first = epoch if first is None else first
        if epoch > first + 1:
            raise InputError(
                "without: no sequence after the run's end has none of the documents; name fewer"
            )
