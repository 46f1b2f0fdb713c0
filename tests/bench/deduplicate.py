"""Documents signed in a second of processor time beside other libraries, and growth with documents.

    python -m tests.bench.deduplicate signatures --corpus 'DIR/*.parquet' [--documents 2000]
    python -m tests.bench.deduplicate growth [--documents 250000 500000 1000000 2000000]

JSON lines. `signatures`: MinHash of 5-grams with 14 bands of 8 rows, of the same documents by each
library that is installed, in turn, several times: the median rate. All start with texts; `shard`
and `datatrove` end with files, the others with signatures in memory. `growth`: the step in a
process of its own on made documents of 40 words, of which a fifth are near-duplicates: seconds,
seconds of processor, peak memory, and at last the exponents of these two over the documents.
Times are of this machine and its load.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data.prepare.minhash import _shingles, band_hashes, signatures

NGRAM, BANDS, ROWS = 5, 14, 8
_ROUNDS = 3
_BATCH = 1024
_WORDS, _LENGTH = 20_000, 40
_FILE = 50_000  # documents of a made file


def rivals(texts: pa.Array, source: str, folder: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """(name, what it does) of each way to sign the texts."""
    batches = [texts.slice(i, _BATCH) for i in range(0, len(texts), _BATCH)]
    yield (
        "ours",
        lambda: [band_hashes(signatures(batch, NGRAM, BANDS * ROWS), BANDS) for batch in batches],
    )
    yield "shard", lambda: _shard(source, folder)
    strings = texts.to_pylist()
    try:
        from rensa import RMinHash
    except ImportError:
        pass
    else:
        yield (
            "rensa",
            lambda: RMinHash.digest_matrix_from_token_sets(
                [_grams(text) for text in strings], BANDS * ROWS, 1
            ),
        )
        yield "rensa of our shingles", lambda: [_rensa(RMinHash, batch) for batch in batches]
    try:
        from datasketch import MinHash
    except ImportError:
        pass
    else:
        yield (
            "datasketch",
            lambda: MinHash.bulk(
                [[gram.encode() for gram in _grams(text)] for text in strings],
                num_perm=BANDS * ROWS,
            ),
        )
    try:
        import xxhash  # noqa: F401 - which its hashes need, and it does not bring
        from datatrove.data import Document
        from datatrove.pipeline.dedup import MinhashDedupSignature
        from datatrove.pipeline.dedup.minhash import MinhashConfig
    except ImportError:
        return
    documents = [Document(text=text, id=str(n)) for n, text in enumerate(strings)]
    config = MinhashConfig(n_grams=NGRAM, num_buckets=BANDS, hashes_per_bucket=ROWS)
    step = MinhashDedupSignature(str(folder / "datatrove"), config)
    try:
        step.get_shingles("its tokenizer is made at the first call")
    except TypeError:  # it hashes text, which xxhash 4 refuses: install 'xxhash<4'
        return
    yield "datatrove", lambda: step.run(iter(documents))


def _grams(text: str) -> list[str]:
    """The shingles as a user of a library makes them."""
    words = re.findall(r"\w+", text.lower())
    return [" ".join(words[i : i + NGRAM]) for i in range(max(1, len(words) - NGRAM + 1))]


def _rensa(kind: Any, batch: pa.Array) -> Any:
    shingles, first = _shingles(batch, NGRAM)
    return kind.digest_matrix_from_flat_token_hashes(
        shingles.astype(np.uint64), first.astype(np.uint64), BANDS * ROWS, 1
    )


def _shard(source: str, folder: Path) -> int:
    """What a worker does for one item: read, sign, write."""
    from data.prepare.comparison import Comparison, NearDuplicates
    from data.prepare.duplicates import sign_shard
    from steps.documents.items import document_items

    comparison = Comparison(NearDuplicates(NGRAM, BANDS, ROWS), "text", {"train": 0}, True)
    found = 0
    for name, item in document_items(source).items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        found += sign_shard(str(folder / name), (item, comparison))["documents"]
    return found


def compare_signatures(corpus: str, documents: int) -> None:
    from data.read.work_units import list_units, read_unit

    found, rows = [], 0
    for unit in list_units(corpus):
        for batch in read_unit(unit, ("id", "text", "token_count")):
            found.append(batch.slice(0, documents - rows))
            rows += found[-1].num_rows
            if rows == documents:
                break
        if rows == documents:
            break
    table = pa.Table.from_batches(found)
    texts = table["text"].combine_chunks()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pq.write_table(table, folder / "corpus.parquet", row_group_size=1000)
        ways = dict(rivals(texts, str(folder / "corpus.parquet"), folder))
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(_ROUNDS):
            for way, sign in ways.items():
                began = time.process_time()
                sign()
                seconds[way].append(time.process_time() - began)
    for way, took in seconds.items():
        rate = rows / statistics.median(took)
        size = table["text"].nbytes / 1e6 / statistics.median(took)
        print(json.dumps({"signed_by": way, "documents_s": round(rate), "mb_s": round(size, 1)}))


def made(documents: int, folder: Path) -> str:
    """Documents in files; a fifth repeats one of the same file with two other words."""
    numbers = np.random.default_rng(documents)
    words = np.array([f"word{n}" for n in range(_WORDS)], object)
    folder.mkdir()
    for begin in range(0, documents, _FILE):
        count = min(_FILE, documents - begin)
        places = numbers.integers(0, _WORDS, (count, _LENGTH))
        again = numbers.choice(count, count // 5, replace=False)
        places[again] = places[numbers.integers(0, count, len(again))]
        places[again, :2] = numbers.integers(0, _WORDS, (len(again), 2))
        table = pa.table(
            {
                "id": [f"{begin + n}" for n in range(count)],
                "text": [" ".join(row) for row in words[places]],
                "token_count": np.full(count, _LENGTH),
            }
        )
        pq.write_table(table, folder / f"{begin:09d}.parquet", row_group_size=10_000)
    return f"{folder}/*.parquet"


def deduplicated(source: str, store: str) -> dict[str, Any]:
    from steps.artifacts import Documents
    from steps.documents.deduplicate import deduplicate
    from tests.steps.built import built

    node = deduplicate(source)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak of memory begins here
    clock, work = time.monotonic(), time.process_time()
    result = built(store, node, Documents).result
    status = Path("/proc/self/status").read_text()
    return {
        "seconds": round(time.monotonic() - clock, 1),
        "cpu_seconds": round(time.process_time() - work, 1),
        "peak_gib": round(int(status.split("VmHWM:")[1].split()[0]) / 2**20, 3),
        "kept": result["documents_kept"],
        "largest_cluster": result["largest_cluster"],
    }


def grow(sizes: list[int]) -> None:
    rows = []
    for documents in sizes:
        with tempfile.TemporaryDirectory() as name:
            source = made(documents, Path(name) / "made")
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                row = pool.apply(deduplicated, (source, f"{name}/store"))
        rows.append({"documents": documents, **row})
        print(json.dumps(rows[-1]), flush=True)
    if len(rows) > 1:
        logs = {name: np.log([row[name] for row in rows]) for name in rows[0]}
        fit = {
            name: round(float(np.polyfit(logs["documents"], logs[name], 1)[0]), 3)
            for name in ("cpu_seconds", "peak_gib")
        }
        print(json.dumps({"exponents": fit}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    kinds = parser.add_subparsers(dest="kind", required=True)
    signing = kinds.add_parser("signatures")
    signing.add_argument("--corpus", required=True)
    signing.add_argument("--documents", type=int, default=2000)
    growth = kinds.add_parser("growth")
    sizes = [250_000, 500_000, 1_000_000, 2_000_000]
    growth.add_argument("--documents", type=int, nargs="+", default=sizes)
    given = parser.parse_args()
    if given.kind == "signatures":
        compare_signatures(given.corpus, given.documents)
    else:
        grow(given.documents)


if __name__ == "__main__":
    main()
