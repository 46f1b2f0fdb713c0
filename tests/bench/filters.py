"""Decisions and speed of the named filters beside datatrove's own run on the same documents.

    python -m tests.bench.filters --corpus 'DIR/*.parquet' [--documents 20000] [--timed 5000]

A JSON line of a chain of filters, with documents a second of processor time, ours and datatrove's,
which take turns on blocks of documents; reading the corpus is not timed, nor is what is done once
per process. Then a line for each filter, with the documents that are kept, changed and dropped by
reason, after every decision was compared with datatrove's.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from data.prepare.filters import (
    C4Paragraph,
    C4Quality,
    Filter,
    FineWebQuality,
    GopherQuality,
    GopherRepetition,
    URLBlockList,
)

CHAIN = (GopherRepetition(), GopherQuality(), C4Quality(), FineWebQuality())
MORE = (C4Quality(filter_no_terminal_punct=False), C4Paragraph(), URLBlockList())
_BLOCK = 500
Document = Mapping[str, Any]


def read(pattern: str, most: int) -> list[Document]:
    """The first documents of a corpus: text and url."""
    import pyarrow.parquet as pq

    from data.read.work_units import list_files

    found: list[Document] = []
    for url, _ in list_files(pattern):
        for batch in pq.ParquetFile(url).iter_batches(columns=["text", "url"]):
            found += batch.to_pylist()
            if len(found) >= most:
                return found[:most]
    return found


def compare(filters: tuple[Filter, ...], documents: list[Document]) -> Iterator[dict[str, Any]]:
    """Counts of each filter's answers; `AssertionError` where datatrove's answer is another."""
    from tests.data.prepare.filter_documents import answer_of, theirs

    oracles = [theirs(made) for made in filters]
    counts = [Counter[str]() for _ in filters]
    for number, document in enumerate(documents):
        for made, oracle, count in zip(filters, oracles, counts, strict=True):
            ours = made(document)
            expected = answer_of(oracle, document["text"], url=document["url"])
            assert ours == (expected or made.reason), (made, number, ours, expected)
            count[ours if isinstance(ours, str) else "kept" if ours is True else "changed"] += 1
    for made, count in zip(filters, counts, strict=True):
        yield {"filter": repr(made), "documents": len(documents), **dict(count.most_common())}


def run_ours(documents: list[Document]) -> Iterator[str]:
    """The texts that the chain keeps, as `filter_documents` asks its filters."""
    for document in documents:
        asked = document
        for made in CHAIN:
            answer = made(asked)
            if isinstance(answer, str):
                break
            if isinstance(answer, dict):
                asked = {**asked, **answer}
        else:
            yield asked["text"]


def run_theirs(documents: list[Document]) -> Iterator[str]:
    """The texts that datatrove's pipeline of the same filters keeps."""
    from datatrove.data import Document as Theirs

    stream: Any = (Theirs(text=d["text"], id="", metadata={"url": d["url"]}) for d in documents)
    for oracle in ORACLES:
        stream = oracle.run(stream)
    for document in stream:
        yield document.text


ORACLES: list[Any] = []


def seconds(
    run: Callable[[list[Document]], Iterator[str]], documents: list[Document]
) -> tuple[float, list[str]]:
    """Processor seconds and what is kept, without words that the other side left behind."""
    from datatrove.utils.text import split_into_parts

    split_into_parts.cache_clear()
    start = time.process_time()
    kept = list(run(documents))
    return time.process_time() - start, kept


def race(documents: list[Document]) -> dict[str, Any]:
    """Rates of the chain on both sides, which keep the same texts."""
    from tests.data.prepare.filter_documents import theirs

    ORACLES[:] = [theirs(made) for made in CHAIN]
    seconds(run_ours, documents[:20]), seconds(run_theirs, documents[:20])
    spent, kept = {"ours": 0.0, "datatrove": 0.0}, 0
    for first in range(0, len(documents), _BLOCK):
        block = documents[first : first + _BLOCK]
        sides = [("ours", run_ours), ("datatrove", run_theirs)]
        texts = {}
        for name, run in sides if first // _BLOCK % 2 else sides[::-1]:
            took, texts[name] = seconds(run, block)
            spent[name] += took
        assert texts["ours"] == texts["datatrove"]
        kept += len(texts["ours"])
    rates = {name: round(len(documents) / took, 1) for name, took in spent.items()}
    return {
        "chain": [type(made).__name__ for made in CHAIN],
        "documents": len(documents),
        "kept": kept,
        "documents_per_second": rates,
        "speedup": round(spent["datatrove"] / spent["ours"], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", required=True)
    parser.add_argument("--documents", type=int, default=20_000)
    parser.add_argument("--timed", type=int, default=5_000)
    given = parser.parse_args()
    documents = read(given.corpus, given.documents)
    print(json.dumps(race(documents[: given.timed])), flush=True)
    for line in compare((*CHAIN, *MORE), documents):
        print(json.dumps(line))


if __name__ == "__main__":
    main()
