"""One measurement of ours and of the bare encoders, in a process of its own.

python -m tests.bench.token_cache_ours backend|parquet|processes|step BACKEND PREPARED SCRATCH
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq

_BATCH = 1024
_PROCESSES = 2
_SCHEMA = pa.schema([("id", pa.string()), ("text", pa.string()), ("token_count", pa.int64())])


def prepare(
    corpus: Path, target: Path, files: int, documents: int, row_group_bytes: int | None = None
) -> None:
    """Copy `files` Parquet files of the corpus as our own, with the tokenizer.

    Args:
        corpus: Parquet files and tokenizer.json.
        target: a directory to make.
        files: of the corpus, the first.
        documents: of each file, the first; 0 for all.
        row_group_bytes: text in a row group; as our own files have it by default.
    """
    from data.read import parquet_table as ours

    target.mkdir()
    shutil.copy(corpus / "tokenizer.json", target / "tokenizer.json")
    size = row_group_bytes or ours._ROW_GROUP_BYTES
    for source in sorted(corpus.glob("*.parquet"))[:files]:
        table = pq.read_table(source, columns=_SCHEMA.names)
        table = table.slice(0, documents or len(table)).cast(_SCHEMA).combine_chunks()
        with (
            mock.patch.object(ours, "_ROW_GROUP_BYTES", size),
            ours.TableWriter(str(target / source.name), _SCHEMA) as writer,
        ):
            for batch in table.to_batches(_BATCH // 4):
                writer.write(batch)


def emit(measure: str, **fields: Any) -> None:
    """Print one measurement."""
    status = Path("/proc/self/status").read_text()
    record = {
        "measure": measure,
        **fields,
        "peak_rss_mib": int(status.partition("VmHWM:")[2].split()[0]) // 1024,
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
    }
    print(json.dumps(record), flush=True)


def items(prepared: Path, backend: str) -> list[Any]:
    """Every row group of the prepared files, as the step's tasks."""
    from data.read.parquet_table import count_row_groups
    from data.tokenizer.text_tokenizer import TextTokenizer
    from steps.tokens.token_cache import DocumentGroup

    tokenizer = str(prepared / "tokenizer.json")
    digest = TextTokenizer.load(tokenizer).digest
    return [
        DocumentGroup(
            file=str(file),
            row_group=group,
            tokenizer=tokenizer,
            digest=digest,
            backend=backend,
        )
        for file in sorted(prepared.glob("*.parquet"))
        for group in range(count_row_groups(str(file)))
    ]


def write(directory: str, item: Any) -> tuple[int, float]:
    """Write one shard; (tokens, processor seconds)."""
    from steps.tokens.token_cache import tokenize_shard

    cpu = time.process_time()
    result = tokenize_shard(directory, item)
    assert not result["measured"]["fell_back"], result
    assert result["measured"]["backend"] == item.backend, result
    return result["tokens"], time.process_time() - cpu


def measure_backend(backend: str, prepared: Path, scratch: Path) -> None:
    """The bare encoder and our shard writer, row groups in turn, on one thread."""
    bare = _bare(backend, prepared / "tokenizer.json")
    rates: dict[str, list[tuple[float, float]]] = {"limit": [], "ours": []}
    tokens = {"limit": 0, "ours": 0}
    for number, item in enumerate(items(prepared, backend)):
        what = ("limit", "ours")[number % 2]
        texts = _texts(item) if what == "limit" else []
        wall, cpu = time.perf_counter(), time.process_time()
        if what == "limit":
            count = bare(texts)
        else:
            count, _ = write(str(scratch / f"{backend}-{number}"), item)
        seconds = time.perf_counter() - wall, time.process_time() - cpu
        tokens[what] += count
        if number > 1:  # the first of each warms up: imports, word caches, memory
            rates[what].append((count / seconds[0], count / seconds[1]))
    medians = {what: _medians(found) for what, found in rates.items()}
    for what, found in medians.items():
        emit(
            what,
            backend=f"{backend} {version(backend)}",
            tokens=tokens[what],
            row_groups=len(rates[what]),
            **found,
        )
    wall, cpu = (
        round(medians["ours"][key] / medians["limit"][key], 3)
        for key in ("tokens_per_s", "tokens_per_cpu_s")
    )
    emit("share", backend=backend, share_wall=wall, share_cpu=cpu)


def measure_parquet(backend: str, prepared: Path, scratch: Path) -> None:
    """Reading the texts alone, pages verified; tokens are the source's own count."""
    from data.read.parquet_table import read_table

    del backend, scratch
    rates = []
    for file in sorted(prepared.glob("*.parquet")) * 2:
        tokens = sum(pq.read_table(file, columns=["token_count"])["token_count"].to_pylist())
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in read_table(str(file), ("text",)):
            pass
        seconds = time.perf_counter() - wall, time.process_time() - cpu
        rates.append((tokens / seconds[0], tokens / seconds[1]))
    emit("parquet", pyarrow=version("pyarrow"), files=len(rates), **_medians(rates[1:]))


def measure_processes(backend: str, prepared: Path, scratch: Path) -> None:
    """The shard writer in two processes of one thread each."""
    work = items(prepared, backend)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(_PROCESSES, context) as pool:
        warm = [str(scratch / f"warm-{backend}-{n}") for n in range(_PROCESSES)]
        list(pool.map(write, warm, work[:_PROCESSES]))
        wall = time.perf_counter()
        rest = work[_PROCESSES:]
        names = [str(scratch / f"process-{backend}-{n}") for n in range(len(rest))]
        found = list(pool.map(write, names, rest))
        seconds = time.perf_counter() - wall
    tokens, cpu = sum(count for count, _ in found), sum(spent for _, spent in found)
    emit(
        "processes",
        backend=f"{backend} {version(backend)}",
        processes=_PROCESSES,
        tokens=tokens,
        tokens_per_s=round(tokens / seconds),
        tokens_per_cpu_s=round(tokens / cpu),
    )


def measure_step(backend: str, prepared: Path, scratch: Path) -> None:
    """The whole step in one process on all cores: footers, ledger, records and manifest too."""
    from pipeline import step
    from pipeline.store import storage
    from steps.artifacts import Tokenizer
    from steps.documents.sample import sample
    from steps.tokens.token_cache import tokenize
    from tests.pipeline.helpers import bring_up, result

    @step(output=Tokenizer, version=1, name="bench_tokenizer")
    def the_tokenizer(run: Any) -> dict[str, Any]:
        """The corpus's own."""
        with run.shard("tokenizer") as directory:
            content = (prepared / "tokenizer.json").read_bytes()
            storage.write_atomic(storage.join(directory, "tokenizer.json"), content)
        return {}

    prefix = str(scratch / f"store-{backend}")
    documents = sample(f"{prepared}/*.parquet", tokens=-1)
    bring_up(prefix, documents, the_tokenizer())
    tokens = tokenize(documents, the_tokenizer(), backend=backend)
    wall, cpu = time.perf_counter(), time.process_time()
    bring_up(prefix, tokens)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    found = result(prefix, tokens)
    count = found["splits"]["train"]["tokens"]
    emit(
        "step",
        backends=found["measured"]["shards_by_backend"],
        documents_checked=found["measured"]["documents_checked"],
        tokens=count,
        tokens_per_s=round(count / wall),
        tokens_per_cpu_s=round(count / cpu),
    )


def _bare(backend: str, tokenizer: Path) -> Callable[[list[str]], int]:
    """The library's own quickest call for texts in memory; answers the number of tokens."""
    if backend == "tokenizers":
        from tokenizers import Tokenizer

        plain = Tokenizer.from_file(str(tokenizer))

        def encode(texts: list[str]) -> int:
            tokens = 0
            for begin in range(0, len(texts), _BATCH):
                part = texts[begin : begin + _BATCH]
                encodings = plain.encode_batch_fast(part, add_special_tokens=False)
                tokens += sum(map(len, encodings))
            return tokens

        return encode
    import fastokens

    fast = fastokens.Tokenizer.from_file(str(tokenizer))
    return lambda texts: sum(len(fast.encode_batch_flat([text])[0]) // 4 for text in texts)


def _texts(item: Any) -> list[str]:
    table = pq.ParquetFile(item.file).read_row_group(item.row_group, columns=["text"])
    return table["text"].to_pylist()


def _medians(rates: list[tuple[float, float]]) -> dict[str, int]:
    if not rates:
        raise ValueError("too few row groups to time: take more files or documents")
    walls, cpus = zip(*rates, strict=True)
    return {
        "tokens_per_s": round(statistics.median(walls)),
        "tokens_per_cpu_s": round(statistics.median(cpus)),
        "best_per_cpu_s": round(max(cpus)),
    }


if __name__ == "__main__":
    # One core, as a worker of Ray has it; the step itself is measured with what there is.
    if sys.argv[1] != "step":
        os.environ["OMP_NUM_THREADS"] = "1"
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
    measures = {
        "backend": measure_backend,
        "parquet": measure_parquet,
        "processes": measure_processes,
        "step": measure_step,
    }
    measures[sys.argv[1]](sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
