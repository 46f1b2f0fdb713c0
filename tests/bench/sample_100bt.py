"""Choosing 20 billion tokens of a source that has the metadata of FineWeb-edu's sample-100BT.

    python -m tests.bench.sample_100bt
    python -m tests.bench.sample_100bt --unit document --files 14

One JSON line: seconds, requests and bytes until every split's documents are known, and by how much
the budget is missed. A server on this machine has 140 Parquet files of 695,000 rows, 1,000 a row
group, with FineWeb-edu's columns; their texts are holes of 3,000 zeros a row, which nothing of this
reads. The files have the same content under different names, so each document is there 140 times:
requests, bytes and hashing are those of 97 million documents, and an edge between splits is 140
times as coarse. The reading processes, `--processes`, share this machine with the server.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data.read.unit import Fields
from data.read.work_units import list_units, read_unit
from data.select.document_hash import document_hash
from data.select.hash_ranges import Ranges, select
from data.select.token_budget import Budget
from pipeline.store.shards import Shard
from steps.sample import _choose_documents, _choose_row_groups, _Request
from steps.sampling.shards import Filter, SampleItem

GROUP, TEXT = 1000, 3000
FILES, ROWS = 140, 695_000
SEED = 0


def main() -> None:
    """Write the file, serve it, choose, and print the line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--unit", choices=("document", "row_group"), default="row_group")
    parser.add_argument("--files", type=int, default=FILES)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="sample_100bt-") as folder:
        path = Path(folder) / "template.parquet"
        write(path, options.rows)
        budget = part_of_budget(options.files * options.rows / (FILES * ROWS))
        with Server(path, options.files) as server:
            line = choose(server, folder, options, budget)
        line |= error_of_budget(path, line.pop("items"), options.files, budget)
    print(json.dumps({"measure": "sample_100bt", "files": options.files, **line}))


def part_of_budget(share: float) -> Budget:
    """Of nanoPT's: 20 billion tokens, 100 million for validation and for test."""
    held_out = int(1e8 * share)
    return Budget(train=int(20e9 * share), splits=(("validation", held_out), ("test", held_out)))


def write(path: Path, rows: int) -> None:
    """The file, with holes for its texts."""
    draw = np.random.default_rng(0)
    text = pa.array([bytes(TEXT).decode()] * GROUP)
    schema = pa.schema(
        [
            *(pa.field(name, pa.string()) for name in ("text", "id", "dump", "url", "file_path")),
            *(pa.field(name, pa.string()) for name in ("language",)),
            pa.field("language_score", pa.float64()),
            pa.field("token_count", pa.int64()),
            pa.field("score", pa.float64()),
            pa.field("int_score", pa.int64()),
        ]
    )
    compression = {name: "NONE" if name == "text" else "SNAPPY" for name in schema.names}
    with pq.ParquetWriter(
        path, schema, compression=compression, use_dictionary=["dump", "language"]
    ) as out:
        for _ in range(rows // GROUP):
            names = [draw.bytes(16).hex() for _ in range(GROUP)]
            ids = [f"<urn:uuid:{n[:8]}-{n[8:12]}-{n[12:16]}-{n[16:20]}-{n[20:]}>" for n in names]
            score = draw.uniform(2.5, 5.0, GROUP)
            columns = {
                "text": text,
                "id": ids,
                "dump": ["CC-MAIN-2024-10"] * GROUP,
                "url": [f"https://www.{n[:12]}.org/{n}" for n in names],
                "file_path": [f"s3://commoncrawl/crawl-data/{n}{n}/warc.gz" for n in names],
                "language": ["en"] * GROUP,
                "language_score": draw.uniform(0.65, 1.0, GROUP),
                # Median and mean of the source's card: 616 and 1,000.
                "token_count": np.minimum(draw.lognormal(6.42, 0.98, GROUP), 1e5).astype(np.int64),
                "score": score,
                "int_score": np.rint(score).astype(np.int64),
            }
            out.write_table(pa.table(columns, schema=schema), row_group_size=GROUP)
            dig(path)


def dig(path: Path) -> None:
    """Give back the disk's blocks of zeros so far."""
    if path.stat().st_blocks * 512 > 1 << 28:
        subprocess.run(["fallocate", "--dig-holes", str(path)], check=True)


class Server:
    """The file under many names, in byte ranges."""

    def __init__(self, path: Path, files: int) -> None:
        self.requests = self.bytes = 0
        self.names = [f"{index:03d}_00000.parquet" for index in range(files)]
        self._lock = threading.Lock()
        outer, size = self, path.stat().st_size
        page = "".join(f'<a href="{name}">{name}</a>' for name in self.names).encode()
        self._file = os.open(path, os.O_RDONLY)

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                self._answer(head=True)

            def do_GET(self) -> None:
                self._answer(head=False)

            def _answer(self, *, head: bool) -> None:
                listing = self.path.endswith("/")
                first, last = 0, (len(page) if listing else size) - 1
                wanted = self.headers.get("Range")
                if wanted and not listing:
                    begin, _, end = wanted.removeprefix("bytes=").partition("-")
                    first, last = int(begin), min(int(end or last), last)
                body = page if listing else outer.read(first, last, head=head)
                self.send_response(206 if wanted and not listing else 200)
                self.send_header("Content-Length", str(last + 1 - first))
                self.send_header("Accept-Ranges", "bytes")
                self.send_header("ETag", '"one"')
                self.send_header("Content-Type", "text/html" if listing else "binary/octet-stream")
                if wanted and not listing:
                    self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
                self.end_headers()
                if not head:
                    self.wfile.write(body)
                outer.count(0 if head else len(body))

            def log_message(self, *arguments: object) -> None:
                """Nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}/sample/100BT/"

    def read(self, first: int, last: int, *, head: bool) -> bytes:
        """Bytes of the file."""
        return b"" if head else os.pread(self._file, last + 1 - first, first)

    def count(self, size: int) -> None:
        """Count a request."""
        with self._lock:
            self.requests += 1
            self.bytes += size

    def __enter__(self) -> Server:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        os.close(self._file)


class Run:
    """What `steps.sample` needs of an attempt while it chooses, with processes of this machine."""

    def __init__(self, root: str, processes: int) -> None:
        self.root = root
        self.seconds: dict[str, float] = {}
        self._pool = ProcessPoolExecutor(processes)

    def progress(self, *_: object) -> None:
        """Nothing."""

    def map(self, function: Callable[..., Any], items: Mapping[str, Any]) -> dict[str, Shard]:
        """Each item's shard, its files where the engine has them; seconds by kind of shard."""
        begun = time.monotonic()
        for name in items:
            os.makedirs(os.path.join(self.root, name))
        places = [os.path.join(self.root, name) for name in items]
        results = list(self._pool.map(function, places, items.values()))
        for kind in {name.partition("/")[0] for name in items}:
            self.seconds[kind] = self.seconds.get(kind, 0.0) + time.monotonic() - begun
        return {
            name: Shard(name=name, root=name, files=(), result=dict(result))
            for name, result in zip(items, results, strict=True)
        }


def choose(server: Server, folder: str, options: argparse.Namespace, budget: Budget) -> dict:
    """What `sample` does before it reads a text."""
    run = Run(folder, options.processes)
    request = _Request(
        run=run,  # type: ignore[arg-type]
        source=server.address + "*.parquet",
        tokenizer=None,
        budget=budget,
        chosen=Filter(SEED, None, keep_hashes=False),
        verify=False,
        fields=Fields("text", None, "score", False),
    )
    begun = time.monotonic()
    choice = (_choose_documents if options.unit == "document" else _choose_row_groups)(request)
    return {
        "unit": options.unit,
        "minutes": round((time.monotonic() - begun) / 60, 2),
        "seconds_by_part": {kind: round(seconds, 1) for kind, seconds in run.seconds.items()},
        "requests": server.requests,
        "gigabytes": round(server.bytes / 1e9, 2),
        "processes": options.processes,
        "items": choice.items,
    }


def error_of_budget(path: Path, items: list[SampleItem], files: int, budget: Budget) -> dict:
    """Tokens of each split, counted in the file itself, over what was asked."""
    units = list_units(str(path), target_bytes=1)
    batches = {
        unit.row_groups[0]: pa.Table.from_batches(read_unit(unit, ("id", "token_count")))
        for unit in units
    }
    held = dict.fromkeys(("train", *dict(budget.splits)), 0)
    if isinstance(items[0].splits, Ranges):
        ranges, table = items[0].splits, pa.concat_tables(batches.values())
        split = select(document_hash(table["id"].combine_chunks(), SEED), ranges)
        counts = table["token_count"].to_numpy()
        for index, name in enumerate(ranges.names):
            held[name] = files * int(counts[split == index].sum())
    else:
        tokens = {index: int(t["token_count"].to_numpy().sum()) for index, t in batches.items()}
        for item in items:
            held[str(item.splits)] += sum(tokens[i] for unit in item.units for i in unit.row_groups)
    asked = {"train": budget.train, **dict(budget.splits)}
    return {
        "units_to_read": sum(len(unit.row_groups) for item in items for unit in item.units),
        "over_budget": {name: held[name] - asked[name] for name in held},
    }


if __name__ == "__main__":
    main()
