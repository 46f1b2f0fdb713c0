"""Samples whole row groups, so that a small sample of a huge source fetches little else.

The seed and the names of the files determine the order of all row groups, the walk: files are
sorted by the hash of their name, row groups by the hash of (name, index), and the walk takes 32 row
groups of each file in turn, then the next 32. Train is a prefix of the walk, so a larger sample
contains the smaller one and only files that the walk reaches are opened. Held-out splits walk from
the other end and are taken first; train skips their row groups, and does not move them when it
grows. Names exclude the directories that all files share, so a copy at another URL has the same
order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from data.read.unit import Fields, Unit
from data.read.work_units import INVALID, NULL, fields_of, file_units, row_groups
from data.select.document_hash import document_hash
from data.select.hash_histogram import above_score

BLOCK_ROW_GROUPS = 32


@dataclass(frozen=True, kw_only=True)
class RowGroupBlock:
    """Up to 32 row groups of one file, neighbours in the walk."""

    file: str
    name: str  # without the directories that all files of the source share
    round: int  # number of blocks of the file before this one
    backwards: bool  # whether the walk is the one from the other end
    fields: Fields = Fields()


@dataclass(frozen=True, kw_only=True)
class Group:
    """One row group and its counts."""

    unit: Unit
    documents: int
    tokens: int
    compressed_bytes: int  # of the file, that reading its documents fetches
    skipped: Mapping[str, int] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, int]:
        """(file, index of the row group)."""
        return self.unit.file, self.unit.row_groups[0]


class RowGroupOrder:
    """The blocks of a source in the order of the walk.

    The number of row groups of a file is known only after its first block was surveyed; the caller
    must pass it to `set_row_group_count` before the next round.
    """

    def __init__(
        self, files: Sequence[str], seed: int, *, backwards: bool, fields: Fields = Fields()
    ) -> None:
        names = _relative_names(files)
        self._files = sorted(files, key=lambda file: (_hash(seed, names[file]), names[file]))
        if backwards:
            self._files.reverse()
        self._names = names
        self._backwards = backwards
        self._fields = fields
        self._counts: dict[str, int] = {}
        self._round = 0
        self._queue = list(self._files)

    def next_blocks(self, limit: int) -> list[RowGroupBlock]:
        """The next blocks, at most `limit` and all of one round; empty at the end of the walk."""
        if not self._queue:
            self._round += 1
            self._queue = [
                f for f in self._files if self._counts.get(f, 0) > self._round * BLOCK_ROW_GROUPS
            ]
        given, self._queue = self._queue[:limit], self._queue[limit:]
        return [
            RowGroupBlock(
                file=f,
                name=self._names[f],
                round=self._round,
                backwards=self._backwards,
                fields=self._fields,
            )
            for f in given
        ]

    def set_row_group_count(self, block: RowGroupBlock, count: int) -> None:
        """Record that `block.file` has `count` row groups; call it for every block of the walk."""
        self._counts[block.file] = count


def block_units(block: RowGroupBlock, seed: int) -> tuple[list[Unit], int]:
    """(the row groups of a block in the order of the walk, row groups of the whole file)."""
    units = file_units(block.file, block.fields, target_bytes=1)
    hashes = [_hash(seed, f"{block.name}\0{unit.row_groups[0]}") for unit in units]
    order = sorted(range(len(units)), key=lambda index: (hashes[index], index))
    if block.backwards:
        order.reverse()
    chosen = order[block.round * BLOCK_ROW_GROUPS : (block.round + 1) * BLOCK_ROW_GROUPS]
    return [units[index] for index in chosen], len(units)


def survey_block(
    block: RowGroupBlock, seed: int, min_score: float | None = None
) -> tuple[list[Group], int]:
    """(counts of a block's row groups, number of row groups of the whole file).

    The text is read only if the file has no `token_count`, to estimate it.
    """
    units, count = block_units(block, seed)
    sizes = [g.compressed_bytes for g in row_groups(block.file, block.fields)]
    groups = []
    for unit in units:
        documents, tokens, tally = 0, 0, Counter[str]()
        for _, batch in above_score((unit,), ("token_count",), min_score, tally):
            documents += batch.num_rows
            tokens += int(batch.column("token_count").to_numpy().sum())
        group = Group(
            unit=unit,
            documents=documents,
            skipped={reason: tally[reason] for reason in (NULL, INVALID) if tally[reason]},
            tokens=tokens,
            compressed_bytes=sum(sizes[index] for index in unit.row_groups),
        )
        groups.append(group)
    return groups, count


def only_group(unit: Unit, index: int) -> Unit:
    """One row group of a unit's file as a unit."""
    if unit.kind not in ("parquet", "documents"):
        return unit
    group = row_groups(unit.file, fields_of(unit))[index]
    return replace(unit, row_groups=(index,), rows=group.rows, text_bytes=group.text_bytes)


def join_units(units: Iterable[Unit], target_bytes: int = 64 << 20) -> list[Unit]:
    joined: list[Unit] = []
    for unit in units:
        last = joined[-1] if joined else None
        if last is not None and last.file == unit.file and last.text_bytes < target_bytes:
            joined[-1] = replace(
                last,
                row_groups=last.row_groups + unit.row_groups,
                rows=last.rows + unit.rows,
                text_bytes=last.text_bytes + unit.text_bytes,
            )
        else:
            joined.append(unit)
    return joined


def _relative_names(files: Sequence[str]) -> dict[str, str]:
    directories = [file.split("/")[:-1] for file in files]
    common = 0
    while len({tuple(d[: common + 1]) for d in directories}) == 1 and common < len(directories[0]):
        common += 1
    return {file: "/".join(file.split("/")[common:]) for file in files}


def _hash(seed: int, name: str) -> int:
    return int(document_hash([name], seed)[0])
