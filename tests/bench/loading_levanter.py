"""Levanter's DataLoader over the same tokens: `python loading_levanter.py WORK OPTIONS`.

Run as a file by the interpreter of an environment with marin-levanter. Writes a cache of the work
directory's `tokens.bin` with Levanter's own writer (int32), once, and reads it as its trainer does.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "disabled")

import jax
import numpy as np
from haliax import Axis
from levanter.data.loader import DataLoader
from levanter.data.text.datasets import (
    BlockShuffleConfig,
    DatasetComponent,
    LmDataConfig,
    UrlDatasetSourceConfig,
)
from levanter.schedule import BatchSchedule
from levanter.store import jagged_array
from levanter.store.cache import SerialCacheWriter
from loading_measure import measure, versions

_DOCUMENT = 1 << 16


def _cache(work: Path) -> Path:
    path = work / "levanter"
    if not (path / "shard_ledger.json").exists():
        tokens = np.fromfile(work / "tokens.bin", np.uint16).astype(np.int32)
        with SerialCacheWriter(str(path), {"input_ids": np.zeros(0, np.int32)}) as writer:
            for begin in range(0, len(tokens), 64 * _DOCUMENT):
                part = tokens[begin : begin + 64 * _DOCUMENT]
                rows = np.split(part, range(_DOCUMENT, len(part), _DOCUMENT))
                writer.write_batch([{"input_ids": row} for row in rows])
    return path


def _stored_bytes(path: Path, tokens: int) -> float:
    files = (file for file in path.rglob("*") if file.is_file())
    return sum(file.stat().st_size for file in files) / tokens


def _batches(
    cache: Path, tokenizer: str, length: int, batch_size: int, shuffle: Any
) -> Iterator[np.ndarray]:
    source = UrlDatasetSourceConfig(train_urls=["none"])
    component = DatasetComponent(source=source, cache_dir=str(cache), flat_cache=True)
    config = LmDataConfig(
        tokenizer=tokenizer,
        cache_dir=str(cache),
        components={"corpus": component},
        shuffle=shuffle,
        auto_build_caches=False,
    )
    dataset = config.train_set(
        Axis("position", length), BatchSchedule(batch_size), key=jax.random.PRNGKey(0)
    )
    devices = np.array(jax.devices()).reshape(1, 1, 1)
    loader = DataLoader(
        dataset,
        batch_size=batch_size,
        max_buffered_batches=128,
        fetch_batch_size=32,
        mesh=jax.sharding.Mesh(devices, ("replica", "data", "model")),
        axis_resources={"batch": ("replica", "data")},
        batch_axis_name="batch",
    )
    for batch in loader:
        yield np.asarray(batch.tokens.array)


def _main(work: str, options: str) -> None:
    given = json.loads(options)
    tokenizer, cache_bytes = given.pop("tokenizer"), given.pop("cache_bytes")
    cache = _cache(Path(work))
    stored = _stored_bytes(cache, (Path(work) / "tokens.bin").stat().st_size // 2)
    kinds: dict[str, Any] = {
        "block 64x1024": BlockShuffleConfig(io_block_size=64, window_blocks=1024),
        "block 256x512": BlockShuffleConfig(io_block_size=256, window_blocks=512),
        "full": True,
    }
    if cache_bytes:
        jagged_array.set_jagged_array_read_cache_bytes(cache_bytes)
    for length in given.pop("lengths"):
        for name, shuffle in kinds.items():
            measure(
                lambda length=length, shuffle=shuffle: _batches(
                    cache, tokenizer, length, given["batch_size"], shuffle
                ),
                name=f"levanter {name}",
                length=length,
                stored_bytes=stored,
                cache_bytes=cache_bytes or jagged_array.CACHE_BYTES_LIMIT,
                versions=versions("marin-levanter", "tensorstore"),
                **given,
            )


if __name__ == "__main__":
    _main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)
