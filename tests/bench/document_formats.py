"""Rates of every kind of document file beside Parquet's, and what many small files cost.

    python -m tests.bench.document_formats --corpus 'DIR/*.parquet'

Writes the corpus's first megabytes as every kind of file, and samples all of it from each: one JSON
line a kind, with the seconds and the text's bytes a second, and the same for 10,000 small files.
Each is measured in a process of its own, with its peak of memory. Times are of the step's own work,
on this machine and its load.
"""

from __future__ import annotations

import argparse
import gzip
import json
import multiprocessing
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

_SMALL_FILES = 10_000


def documents(pattern: str, megabytes: float) -> pa.Table:
    """The first documents of a corpus, with id and text."""
    from data.read.work_units import list_units, read_unit

    found, size = [], 0
    for unit in list_units(pattern):
        for batch in read_unit(unit, ("id", "text")):
            found.append(batch)
            size += batch.column("text").nbytes
            if size >= megabytes * 1e6:
                return pa.Table.from_batches(found)
    return pa.Table.from_batches(found)


def write(kind: str, table: pa.Table, folder: Path) -> str:
    """The documents as one kind of file; the source that names them."""
    folder.mkdir(parents=True)
    lines = b"".join(
        json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in table.to_pylist()
    )
    path = folder / f"x.{kind}"
    if kind == "parquet":
        pq.write_table(table, path, row_group_size=1000)
    elif kind == "arrow":
        with pa.ipc.new_stream(str(path), table.schema) as out:
            out.write_table(table, max_chunksize=1000)
    elif kind == "jsonl":
        path.write_bytes(lines)
    elif kind == "jsonl.gz":
        path.write_bytes(gzip.compress(lines, 6))
    elif kind == "jsonl.zst":
        with pa.OSFile(str(path), "wb") as raw, pa.CompressedOutputStream(raw, "zstd") as out:
            out.write(lines)
    else:
        for index, text in enumerate(table.column("text").to_pylist()):
            (folder / f"{index:06d}.txt").write_text(text, encoding="utf-8")
    return str(folder)


def measure(source: str, store: str) -> dict[str, Any]:
    """Seconds, seconds of processor and peak memory of sampling all of a source, in a process."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(_sample, (source, store))


def _sample(source: str, store: str) -> dict[str, Any]:
    import steps
    from tests.pipeline.helpers import bring_up

    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak of memory begins here
    clock, cpu = time.monotonic(), time.process_time()
    bring_up(store, steps.sample(source, tokens=-1))
    status = Path("/proc/self/status").read_text()
    peak = next(int(line.split()[1]) for line in status.splitlines() if "VmHWM" in line)
    return {
        "seconds": round(time.monotonic() - clock, 2),
        "cpu_seconds": round(time.process_time() - cpu, 2),
        "peak_mb": round(peak / 1e3),
        "store_mb": round(_bytes(store) / 1e6, 2),
    }


def _bytes(folder: str) -> int:
    return sum(
        os.path.getsize(os.path.join(place, name))
        for place, _, names in os.walk(folder)
        for name in names
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", required=True)
    parser.add_argument("--megabytes", type=float, default=40)
    parser.add_argument("--only", default="", help="what holds this in its name")
    asked = parser.parse_args()
    table = documents(asked.corpus, asked.megabytes)
    size = sum(len(text.encode()) for text in table.column("text").to_pylist())
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)

        def report(what: str, source: str, size: int) -> None:
            if asked.only in what:
                found = measure(source, str(folder / "store" / what))
                rate = round(size / 1e6 / found["seconds"], 1)
                print(json.dumps({"what": what, "text_mb": size / 1e6, "mb_per_s": rate, **found}))

        for kind in ("parquet", "jsonl", "jsonl.gz", "jsonl.zst", "arrow", "txt"):
            report(kind, write(kind, table, folder / kind), size)
        small = pa.table({"text": [f"Small document number {n}." for n in range(_SMALL_FILES)]})
        source = write("txt", small, folder / "small")
        report(f"{_SMALL_FILES} small files", source, _bytes(source))


if __name__ == "__main__":
    main()
