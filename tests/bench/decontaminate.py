"""Documents and megabytes a processor second of decontamination and of a classifier.

    python -m tests.bench.decontaminate --corpus 'DIR/*.parquet' [--items N] [--datatrove DOCUMENTS]

The evaluation set is made: half of its items are 60 words of a document of the corpus each, the
others are 60 of its words in random order. Prints a line of JSON for each part: the table of
n-grams, the search in memory, the whole shard (read, search, remove, write) by document and by
span, the scores of a classifier and, with --datatrove, the filter of datatrove on the first
documents and whether it decides as ours. Seconds are of this process, on all of its threads.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

_NGRAM, _LEAST = 13, 8


def measured(name: str, work: Callable[[], Any], documents: int, size: int, **more: Any) -> Any:
    """What the work returns; prints its rates."""
    wall, cpu = time.perf_counter(), time.process_time()
    found = work()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    rates = {"documents_per_cpu_second": documents / cpu, "mb_per_cpu_second": size / 1e6 / cpu}
    seconds = {"cpu_seconds": cpu, "wall_seconds": wall, "peak_mib": peak}
    print(
        json.dumps({"part": name, "documents": documents, **rates, **seconds, **more}), flush=True
    )
    return found


def evaluation_set(texts: pa.Array, items: int) -> list[str]:
    """Texts of 60 words: of documents, in turn with random ones."""
    rng = np.random.default_rng(0)
    found = []
    for row in rng.integers(0, len(texts), items).tolist():
        words = texts[row].as_py().split()
        begin = int(rng.integers(0, max(1, len(words) - 60)))
        own = words[begin : begin + 60]
        found.append(" ".join(own if len(found) % 2 else rng.permutation(own)))
    return found


def main() -> None:
    """Measure all parts, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", required=True)
    parser.add_argument("--items", type=int, default=5000)
    parser.add_argument("--datatrove", type=int, default=0)
    given = parser.parse_args()

    from data.arrays import save_array
    from data.prepare.classifier import TextClassifier
    from data.prepare.contamination import Cut
    from data.prepare.items import read_documents
    from data.prepare.ngrams import find_hits, make_table
    from steps.documents.decontaminate import _Work, clean_shard
    from steps.documents.items import document_items

    work = list(document_items(given.corpus).values())
    batches = [batch.column("text") for item in work for _, batch in read_documents(item)]
    documents, size = sum(map(len, batches)), sum(batch.nbytes for batch in batches)
    items = evaluation_set(pa.chunked_array(batches).combine_chunks(), given.items)
    columns = [pa.array(range(len(items)), pa.int64()), pa.array(items)]
    own = [pa.record_batch(columns, ["item", "text"])]
    sizes = len(items), sum(len(item.encode()) for item in items)
    table, counts = measured("table", lambda: make_table({"made": own}, _NGRAM, _LEAST), *sizes)
    hits = measured(
        "search", lambda: [find_hits(table, batch) for batch in batches], documents, size
    )
    rows = sum(len(np.unique(each.text)) for each in hits)
    print(json.dumps({"ngrams": counts["made"].ngrams, "documents_with_hits": rows}))
    with tempfile.TemporaryDirectory() as folder:
        for name in ("hashes", "owners"):
            save_array(f"{folder}/{name}.npy", getattr(table, name))
        save_array(f"{folder}/lengths.npy", np.array(table.lengths))
        for name, cut in (("document", None), ("span", Cut(200, 200, 10))):

            def shards(name: str = name, cut: Cut | None = cut) -> list[Any]:
                made = [_Work(item, folder, ("made",), cut) for item in work]
                return [clean_shard(f"{folder}/{name}{n}", one) for n, one in enumerate(made)]

            written = measured(name, shards, documents, size)
            dropped = sum(sum(shard["dropped"].values()) for shard in written)
            print(json.dumps({"part": name, "dropped": dropped}))
    weights = np.random.default_rng(0).normal(size=1 << 18).astype(np.float32)
    classifier = TextClassifier(weights, 0.0, 2)
    measured("score", lambda: [classifier.score(batch) for batch in batches], documents, size)
    if given.datatrove:
        texts = [text for batch in batches for text in batch.to_pylist()][: given.datatrove]
        mine = {int(row) for row in find_hits(table, pa.array(texts)).text}
        beside_datatrove(texts, items, mine)


def beside_datatrove(texts: list[str], items: list[str], mine: set[int]) -> None:
    """The filter of datatrove with the same n-grams, on the first documents."""
    from datatrove.data import Document
    from datatrove.pipeline.decont import n_grams
    from datatrove.utils.hashing import HashConfig

    hashes_by = HashConfig(hash_fc="sha1")  # its default does not work with xxhash 4
    config = n_grams.NGramsDecontConfig(n_grams=_NGRAM, hash_config=hashes_by)
    with tempfile.TemporaryDirectory() as folder:
        found = n_grams.NGramsDecontFilter(folder, config)
        hashed = n_grams.NGramsDecontIndexer.compute_hashes  # needs lighteval to be made
        hashes = {value for item in items for value in hashed(found, item)}
        array = np.array(list(hashes), config.hash_config.np_descr)
        (Path(folder) / "made.index.hashes").write_bytes(array.tobytes())
        found.filter(Document(text="one", id="0"))  # loads the index and the words' model
        made = [Document(text=text, id=str(row)) for row, text in enumerate(texts)]
        kept = measured(
            "datatrove",
            lambda: [found.filter(document) is True for document in made],
            len(texts),
            sum(len(text.encode()) for text in texts),
        )
    theirs = {row for row, clean in enumerate(kept) if not clean}
    print(json.dumps({"both": len(mine & theirs), "ours": len(mine), "theirs": len(theirs)}))


if __name__ == "__main__":
    main()
