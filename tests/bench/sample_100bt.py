"""Choosing 20 billion tokens of a source that has the metadata of FineWeb-edu's sample-100BT.

    python -m tests.bench.sample_100bt
    python -m tests.bench.sample_100bt --files 14

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
from concurrent.futures import ProcessPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data.read.unit import Unit
from data.read.work_units import list_units, read_unit
from data.select.document_hash import document_hash
from data.select.hash_histogram import HashHistogram, documents_in, merge, survey
from data.select.hash_ranges import BoundaryDocuments, Ranges, boundary_bins, select, thresholds
from data.select.token_budget import Budget

GROUP, TEXT = 1000, 3000
FILES, ROWS = 140, 695_000
SEED = 0


def main() -> None:
    """Write the file, serve it, choose, and print the line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", type=int, default=FILES)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="sample_100bt-") as folder:
        path = Path(folder) / "template.parquet"
        write(path, options.rows)
        with Server(path, options.files) as server:
            budget = part_of_budget(options.files * options.rows / (FILES * ROWS))
            line = choose(server, options.processes, budget)
        line |= error_of_budget(path, options.files, line.pop("ranges"), budget)
    print(json.dumps({"measure": "sample_100bt", "files": options.files, **line}))


def part_of_budget(share: float) -> Budget:
    """Of nanoPT's: 20 billion tokens, 100 million for validation and for test."""
    held_out = int(1e8 * share)
    return Budget(train=int(20e9 * share), held_out=(("validation", held_out), ("test", held_out)))


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


def choose(server: Server, processes: int, budget: Budget) -> dict:
    """What `sample` does before it reads a text: list, count by hash, look at the edges' bins."""
    begun = time.monotonic()
    units = list_units(server.address + "*.parquet")
    listed, seconds = server.requests, [time.monotonic() - begun]
    groups = _by_file(units)
    with ProcessPoolExecutor(processes) as pool:
        counted = merge(pool.map(_survey, groups))
        seconds.append(time.monotonic() - begun)
        surveyed = server.requests
        bins = boundary_bins(counted, budget)
        found = np.concatenate(list(pool.map(_edge, groups, [bins] * len(groups))), axis=1)
    edge = BoundaryDocuments.of(bins, found[0], found[1].astype(np.int64))
    ranges = thresholds(counted, budget, None, edge)
    seconds.append(time.monotonic() - begun)
    return {
        "documents": counted.documents,
        "tokens": counted.tokens,
        "seconds": {
            "list": round(seconds[0], 1),
            "count": round(seconds[1] - seconds[0], 1),
            "edges": round(seconds[2] - seconds[1], 1),
            "all": round(seconds[2], 1),
        },
        "requests": {
            "list": listed,
            "count": surveyed - listed,
            "edges": server.requests - surveyed,
            "all": server.requests,
        },
        "gigabytes": round(server.bytes / 1e9, 2),
        "processes": processes,
        "ranges": ranges,
    }


def _by_file(units: list[Unit]) -> list[list[Unit]]:
    """Sixteen neighbours of one file a task, as `steps/sample.py` has it."""
    found: list[list[Unit]] = []
    for unit in units:
        if not found or found[-1][0].file != unit.file or len(found[-1]) == 16:
            found.append([])
        found[-1].append(unit)
    return found


def _survey(units: list[Unit]) -> HashHistogram:
    return survey(units, SEED)


def _edge(units: list[Unit], bins: np.ndarray) -> np.ndarray:
    return documents_in(units, bins, SEED)


def error_of_budget(path: Path, files: int, ranges: Ranges, budget: Budget) -> dict:
    """Tokens of each split, counted in the file itself, over what was asked."""
    table = pa.Table.from_batches(
        [b for unit in list_units(str(path)) for b in read_unit(unit, ("id", "token_count"))]
    )
    hashes = document_hash(table["id"].combine_chunks(), SEED)
    split = select(hashes, ranges)
    counts = table["token_count"].to_numpy()
    held = {name: files * int(counts[split == i].sum()) for i, name in enumerate(ranges.names)}
    asked = {"train": budget.train, **dict(budget.held_out)}
    return {"over_budget": {name: held[name] - asked[name] for name in held}}


if __name__ == "__main__":
    main()
