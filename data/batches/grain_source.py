"""A data set for Grain's pipelines: random access to rows in stored order.

`grain.MapDataset.source(GrainSource(spec))` shuffles, repeats, shards and batches by Grain's own
rules; the spec's shuffle and mixture are not applied. This module does not import Grain, whose
random access sources only need `__len__` and `__getitem__`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, SupportsIndex

import numpy as np

from data.batches.dataset import Dataset, DatasetSpec


class GrainSource:
    """The rows of a spec as a `grain.sources.RandomAccessDataSource`.

    Only the spec is pickled for worker processes, so each process opens a shard when it first
    reads a row of it. Safe to read from several threads.

    Args:
        spec: the tokens to read and the length of a row.

    Raises:
        InputError: a source of the spec has no row.
    """

    def __init__(self, spec: DatasetSpec) -> None:
        self._spec = spec
        self._dataset = Dataset(spec)

    def __len__(self) -> int:
        return self._dataset.sequences

    def __getitem__(self, index: SupportsIndex) -> np.ndarray:
        """Row `index`, from 0: int32 (sequence_length,); raises as `Dataset.read_rows`."""
        return self._dataset.read_rows(np.array([index.__index__()], np.int64))[0]

    def _getitems(self, indices: Sequence[int]) -> list[np.ndarray]:
        """Several rows in one read; Grain's own name for it."""
        return list(self._dataset.read_rows(np.array(indices, np.int64)))

    def close(self) -> None:
        """Close the open files; a later read opens them again."""
        self._dataset.close()

    def __repr__(self) -> str:
        # Grain stores this text in its checkpoints and compares it on restore. The same rows must
        # give the same text on another machine, so it has the shards' content and not their paths.
        digest = hashlib.sha256()
        for source in self._spec.sources:
            for shard in source.shards:
                digest.update(f"{shard.tokens} {shard.check}\n".encode())
            digest.update(b"\n")
        return (
            f"GrainSource(rows={len(self)}, sequence_length={self._spec.sequence_length}, "
            f"tokens={digest.hexdigest()[:16]})"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {"spec": self._spec}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["spec"])
