"""Reads and writes the parameters of a checkpoint array by array, in one process, on no device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from models.jax_numerics import random_key
from models.shape.config import TransformerConfig
from models.transformer import Transformer
from pipeline.errors import InputError
from training.checkpoint import tree_names
from training.checkpoint.chunk_grid import (
    CHUNK_BYTES,
    Box,
    chunk_shape,
    metadata,
    metadata_file,
)
from training.checkpoint.chunks import read_box, write_chunks
from training.checkpoint.device_to_host import HostShard
from training.checkpoint.files import Deadline, Files, open_files
from training.checkpoint.index import PROGRESS, WrittenChunks, read_index, write_index
from training.checkpoint.restore import EMA, MODEL

_TIMEOUT_SECONDS = 3600.0


def describe_model(config: TransformerConfig) -> dict[str, dict[str, Any]]:
    """Axes, shape and dtype of every array of a model, by its path in a `Transformer`."""
    return tree_names.describe(jax.eval_shape(lambda: Transformer.init(config, key=random_key(0))))


class StoredModel:
    """The parameters of a checkpoint, for reading one part at a time.

    Those are the EMA (`is_ema`) where `ema` is set and the run kept one.

    Raises:
        CorruptOutput: the index is missing or changed.
        InputError: the checkpoint is of another model; names the array.
    """

    def __init__(self, path: str, config: TransformerConfig, *, ema: bool = True) -> None:
        leaves = read_index(path)["leaves"]
        self.is_ema = ema and any(name.startswith(EMA) for name in leaves)
        self._prefix = EMA if self.is_ema else MODEL
        self._path = path
        self._leaves = {n: e for n, e in leaves.items() if n.startswith(self._prefix)}
        self._files = open_files(path, Deadline(_TIMEOUT_SECONDS, f"{path}: reading"))
        wanted = {self._prefix + name: entry for name, entry in describe_model(config).items()}
        if difference := tree_names.mismatch(self._leaves, wanted):
            raise InputError(f"{path}: {difference}; the checkpoint is of another model")

    def read(self, name: str, rows: tuple[int, int] | None = None) -> np.ndarray:
        """The values of an array, or of indices [begin, end) of its first axis.

        Raises `CorruptOutput` where a chunk is missing or changed.
        """
        entry = self._leaves[self._prefix + name]
        first, *others = ((0, size) for size in entry["shape"])
        box = (rows or first, *others)
        return read_box(self._path, self._files, self._prefix + name, entry, box)


class ModelWriter:
    """Writes a checkpoint of parameters only, of step 0, to a path that does not exist yet."""

    def __init__(self, path: str, config: TransformerConfig) -> None:
        self._path = path
        self._files: Files = open_files(path, Deadline(_TIMEOUT_SECONDS, f"{path}: writing"))
        self._written = WrittenChunks()
        self._leaves: dict[str, dict[str, Any]] = {
            MODEL + name: {**entry, "itemsize": 4, "chunk": _chunk(name, entry["shape"])}
            for name, entry in describe_model(config).items()
        }

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._leaves[MODEL + name]["shape"])

    def write(self, name: str, values: np.ndarray, rows: tuple[int, int]) -> None:
        """Write float32 values of indices [begin, end) of an array's first axis, each index once.

        Raises `InputError` where they are not finite.
        """
        entry = self._leaves[MODEL + name]
        box: Box = (rows, *((0, size) for size in entry["shape"][1:]))
        shard = HostShard(MODEL + name, box, values)
        self._written.join(write_chunks(self._files, [shard], self._leaves))

    def finish(self) -> None:
        """Complete the checkpoint. Raises `StorageError` when rows are missing."""
        for name, entry in self._leaves.items():
            self._written.add_file(self._files, metadata_file(name), metadata(entry))
        self._written.add_file(self._files, PROGRESS, b"{}")
        write_index(self._path, 0, self._leaves, self._written)


def _chunk(name: str, shape: Iterable[int]) -> list[int]:
    """Chunk shape; chunks of stacked layers do not span layers, which are written one by one."""
    first, *others = shape
    written = (1 if name.startswith("blocks.") else first, *others)
    return list(chunk_shape(written, 4, CHUNK_BYTES))
