"""Write safetensors files piece by piece; the library's own writer needs all tensors in memory.

A file is the length of a header (8 bytes, little-endian), the header (JSON of dtype, shape and
offsets of every tensor), and the tensors' bytes (https://huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from models.hf.tensors import Tensor
from pipeline.errors import InputError
from pipeline.store import storage
from steps.exchange.hf.hf_files import SINGLE

DTYPES: dict[str, tuple[str, Any]] = {
    "bfloat16": ("BF16", ml_dtypes.bfloat16),
    "float32": ("F32", np.float32),
}
"""The name in a file and the NumPy dtype, by the dtype of the export."""

_ALIGNED = 8


@dataclass(frozen=True)
class ShardPlan:
    """One file: its name and its tensors in order."""

    file: str
    tensors: tuple[Tensor, ...]


def plan_shards(tensors: Iterable[Tensor], itemsize: int, most: int) -> list[ShardPlan]:
    """Files of at most `most` bytes, in the tensors' order; a larger tensor gets its own file."""
    groups: list[list[Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        more = math.prod(tensor.shape) * itemsize
        if groups[-1] and size + more > most:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += more
    if len(groups) == 1:
        return [ShardPlan(SINGLE, tuple(groups[0]))]
    names = (f"model-{i:05d}-of-{len(groups):05d}.safetensors" for i in range(1, len(groups) + 1))
    return [ShardPlan(name, tuple(group)) for name, group in zip(names, groups, strict=True)]


def write_shard(
    url: str,
    tensors: Sequence[Tensor],
    dtype: str,
    pieces: Callable[[Tensor], Iterable[np.ndarray]],
) -> int:
    """Write one file; returns the number of bytes of its tensors.

    Args:
        pieces: returns the float32 values of a tensor, in row-major order.
    """
    code, kind = DTYPES[dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        begin, end = end, end + math.prod(tensor.shape) * np.dtype(kind).itemsize
        header[tensor.name] = {
            "dtype": code,
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNED)
    with storage.open_write(url) as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for tensor in tensors:
            count = 0
            for piece in pieces(tensor):
                stored = np.ascontiguousarray(piece.astype(kind, copy=False))
                if not np.isfinite(stored).all():
                    raise InputError(
                        f"{tensor.name}: expected finite values in {dtype}; export it as float32, "
                        "or another checkpoint if that is refused too"
                    )
                file.write(stored.reshape(-1).view(np.uint8).data)
                count += stored.size
            assert count == math.prod(tensor.shape), tensor.name
    return end
