"""What counts as duplicates: the settings of deduplication. Importing this file is cheap."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from pipeline.errors import InputError

_MOST_PERMUTATIONS = 1 << 12


@dataclass(frozen=True)
class NearDuplicates:
    """When two texts count as nearly equal: they agree in all rows of a band of their signatures.

    Of the pairs of texts whose sets of shingles have a Jaccard similarity s, a share of about
    1 - (1 - s^rows)^bands is found: with the defaults 5 % at 0.5, 92 % at 0.8 and all from 0.95 on.

    Attributes:
        ngram: words of a shingle.
        bands: more of them find texts that are less similar.
        rows: of a band; more of them find fewer texts.
    """

    ngram: int = 5
    bands: int = 14
    rows: int = 8

    def __post_init__(self) -> None:
        for name in ("ngram", "bands", "rows"):
            if (value := getattr(self, name)) < 1:
                raise InputError(f"NearDuplicates({name}={value}): expected 1 or more")
        if self.permutations > _MOST_PERMUTATIONS:
            raise InputError(
                f"NearDuplicates(bands={self.bands}, rows={self.rows}): {self.permutations:,} "
                f"permutations; expected {_MOST_PERMUTATIONS:,} at most"
            )

    @property
    def permutations(self) -> int:
        return self.bands * self.rows


class Comparison(NamedTuple):
    """What is compared, and how."""

    near: NearDuplicates | None  # None for equality
    by: str  # the column
    ranks: Mapping[str, int]  # of the splits; the document with the lowest one is kept
    across: bool  # whether documents of different splits are compared

    @property
    def bands(self) -> int:
        return self.near.bands if self.near else 1

    @property
    def words(self) -> int:
        """Words of 64 bits of a key."""
        return 1 if self.near else 2

    def reason(self, split: str, keeper: str) -> str:
        """Why a document is dropped, from its split and its keeper's."""
        what = f"{'near-' if self.near else ''}duplicate {self.by}"
        return what if split == keeper else f"{what} in {keeper}"
