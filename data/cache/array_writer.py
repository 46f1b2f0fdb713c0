"""Writes the arrays of a token shard with TensorStore."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorstore as ts

from data.cache.shard_io import store_context, store_spec, wait
from pipeline.errors import StorageError


class ArrayWriter:
    """Writes the arrays of one shard with TensorStore; they are durable when the `with` block ends.

    However the block ends, no write is in flight afterwards, unless the store did not answer within
    the timeout.

    Args:
        directory: a local path or a URL of gs:// or s3://.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._context = store_context()
        self._begun: list[ts.Future | ts.WriteFutures] = []

    def begin(self, arrays: dict[str, tuple[dict[str, Any], np.ndarray]]) -> None:
        """Create arrays and start writing them.

        Args:
            arrays: parsed zarr.json and values of each array, by name. The values are not copied
                and must not change until the `with` block ends.

        Raises:
            StorageError: an array exists already, or the store failed.
        """
        opening = [self._open(name, metadata) for name, (metadata, _) in arrays.items()]
        self._begun += opening
        for opened, (_, values) in zip(opening, arrays.values(), strict=True):
            array = wait(opened, self._directory, writing=True)
            if values.size:
                writing = array.write(values, can_reference_source_data_indefinitely=True)
                self._begun.append(writing)

    def __enter__(self) -> ArrayWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        failed: StorageError | None = None
        for begun in self._begun:
            try:
                wait(begun, self._directory, writing=True)
            except StorageError as error:
                failed = failed or error
        if failed is not None and kind is None:
            raise failed

    def _open(self, name: str, metadata: dict[str, Any]) -> ts.Future:
        store = store_spec(self._directory)
        spec = {
            "driver": "zarr3",
            "kvstore": store | {"path": f"{store['path']}{name}/"},
            "metadata": metadata,
            # Without this TensorStore writes no file for all zeros, which would read as corrupt.
            "store_data_equal_to_fill_value": True,
        }
        return ts.open(spec, create=True, context=self._context)
