"""Other readers of the same tokens: `python loading_peers.py WORK OPTIONS`, in their environment.

Run as a file by the interpreter of an environment with datatrove (and torch), datasets, grain and
array-record; what is not installed is said and left out. Reads `tokens.bin` of the work directory
(uint16) and builds from it what each reader wants, once.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from loading_measure import emit, measure, versions

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def _rows(work: Path, length: int) -> np.ndarray:
    tokens = np.memmap(work / "tokens.bin", dtype=np.uint16, mode="r")
    return tokens[: len(tokens) // length * length].reshape(-1, length)


def datatrove(work: Path, length: int, batch_size: int, options: dict[str, Any]) -> None:
    """DatatroveFileDataset, whose own file is the bare tokens, as its users stack items."""
    import torch
    from datatrove.utils.dataset import DatatroveFileDataset

    dataset = DatatroveFileDataset(str(work / "tokens.bin"), length - 1, token_size=2)

    def make(shuffled: bool) -> Iterator[Any]:
        order, chance = list(range(len(dataset))), random.Random(0)
        while True:
            if shuffled:
                chance.shuffle(order)
            for begin in range(0, len(order) - batch_size, batch_size):
                items = order[begin : begin + batch_size]
                yield torch.stack([dataset[item]["input_ids"] for item in items])

    for name, shuffled in (("random", True), ("sequential", False)):
        measure(
            lambda shuffled=shuffled: make(shuffled),
            name=f"datatrove {name}",
            stored_bytes=2,
            versions=versions("datatrove", "torch"),
            **options,
        )


def arrow(work: Path, length: int, batch_size: int, options: dict[str, Any]) -> None:
    """Hugging Face datasets: rows saved to disk, numpy format."""
    import datasets

    directory = work / f"arrow-{length}"
    if not directory.exists():
        rows = _rows(work, length)

        def generate() -> Iterator[dict[str, np.ndarray]]:
            for row in rows:
                yield {"input_ids": row}

        datasets.disable_progress_bars()
        features = datasets.Features(input_ids=datasets.List(datasets.Value("int32")))
        made = datasets.Dataset.from_generator(
            generate, features=features, cache_dir=str(work / "arrow-cache")
        )
        made.save_to_disk(str(directory))
    dataset = datasets.load_from_disk(str(directory)).with_format("numpy")

    def make(shuffled: bool) -> Iterator[Any]:
        ordered = dataset.shuffle(seed=0) if shuffled else dataset
        while True:
            for batch in ordered.iter(batch_size=batch_size):
                yield batch["input_ids"]

    for name, shuffled in (("random", True), ("sequential", False)):
        measure(
            lambda shuffled=shuffled: make(shuffled),
            name=f"datasets arrow {name}",
            stored_bytes=None,
            versions=versions("datasets", "pyarrow"),
            **options,
        )


def grain(work: Path, length: int, batch_size: int, options: dict[str, Any]) -> None:
    """ArrayRecord of rows, shuffled and batched by Grain; with threads and without."""
    import grain as library
    from array_record.python import array_record_module

    path = work / f"rows-{length}.array_record"
    if not path.exists():
        writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
        for row in _rows(work, length):
            writer.write(row.tobytes())
        writer.close()
    source = library.sources.ArrayRecordDataSource(str(path))

    def make(threads: int) -> Iterator[Any]:
        data = library.MapDataset.source(source).seed(0).shuffle().repeat()
        data = data.map(lambda row: np.frombuffer(row, np.uint16).astype(np.int32))
        options = library.ReadOptions(num_threads=threads, prefetch_buffer_size=500)
        return iter(data.batch(batch_size).to_iter_dataset(options))

    for threads in (2, 0):
        measure(
            lambda threads=threads: make(threads),
            name=f"grain array_record {threads} threads",
            stored_bytes=path.stat().st_size / _rows(work, length).size,
            versions=versions("grain", "array-record"),
            **options,
        )


def _main(work: str, options: str) -> None:
    given = json.loads(options)
    readers: list[Callable[..., None]] = [datatrove, arrow, grain]
    for length in given.pop("lengths"):
        settings = {**given, "length": length}
        for reader in readers:
            try:
                reader(Path(work), length, given["batch_size"], settings)
            except ImportError as error:
                emit(name=reader.__name__, sequence_length=length, skipped=str(error))


if __name__ == "__main__":
    _main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # Grain's threads would be waited for
