"""Other libraries from documents to stored tokens; runs in an environment of theirs.

    ENV/bin/python tests/bench/token_cache_peers.py datasets|datatrove|levanter DOCUMENTS SCRATCH

Only the standard library and the one that is measured are imported; nothing of ours.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

EOS = "<|endoftext|>"
PROCESSES = 2


def cpu_seconds() -> float:
    """Of this process and of children it has waited for."""
    who = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(sum(resource.getrusage(w)[:2]) for w in who)


def emit(
    measure: str, run: Callable[[], int], *, counts_cpu: bool = True, **fields: object
) -> None:
    """Time one run, which answers its number of tokens; not all wait for their workers."""
    wall, cpu = time.perf_counter(), cpu_seconds()
    tokens = run()
    wall, cpu = time.perf_counter() - wall, cpu_seconds() - cpu
    status = Path("/proc/self/status").read_text()
    record = {
        "measure": measure,
        **fields,
        "tokens": tokens,
        "seconds": round(wall, 1),
        "tokens_per_s": round(tokens / wall),
        "tokens_per_cpu_s": round(tokens / cpu) if counts_cpu else None,
        "peak_rss_mib": int(status.partition("VmHWM:")[2].split()[0]) // 1024,
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
    }
    print(json.dumps(record), flush=True)


def files(documents: Path) -> list[str]:
    """The Parquet files."""
    return [str(file) for file in sorted(documents.glob("*.parquet"))]


def datasets(documents: Path, scratch: Path) -> None:
    """`load_dataset` and `map` over two processes, ids in Arrow files."""
    import datasets as library
    from tokenizers import Tokenizer

    library.disable_progress_bars()
    tokenizer = Tokenizer.from_file(str(documents / "tokenizer.json"))
    eos = tokenizer.token_to_id(EOS)

    def encode(rows: dict[str, list[str]]) -> dict[str, list[object]]:
        found = tokenizer.encode_batch_fast(rows["text"], add_special_tokens=False)
        ids = [[*encoding.ids, eos] for encoding in found]
        return {"input_ids": ids, "length": [len(part) for part in ids]}

    def run() -> int:
        loaded = library.load_dataset(
            "parquet", data_files=files(documents), split="train", cache_dir=str(scratch / "hf")
        )
        mapped = loaded.map(
            encode, batched=True, num_proc=PROCESSES, remove_columns=loaded.column_names
        )
        return sum(mapped["length"])

    emit("datasets", run, version=version("datasets"), processes=PROCESSES)


def datatrove(documents: Path, scratch: Path) -> None:
    """Parquet reader and document tokenizer: one worker in this process, then two workers."""
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import ParquetReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    def run(workers: int) -> int:
        out = scratch / f"datatrove-{workers}"
        steps = [
            ParquetReader(str(documents), text_key="text", id_key="id", glob_pattern="*.parquet"),
            DocumentTokenizer(
                str(out),
                tokenizer_name_or_path=str(documents / "tokenizer.json"),
                eos_token=EOS,
                shuffle_documents=False,
            ),
        ]
        LocalPipelineExecutor(
            pipeline=steps, tasks=workers, workers=workers, logging_dir=f"{out}-logs"
        ).run()
        return sum(file.stat().st_size for file in out.rglob("*.ds")) // 2

    # Its workers are children of a server that nobody waits for.
    both = {"version": version("datatrove")}
    emit("datatrove", lambda: run(PROCESSES), counts_cpu=False, processes=PROCESSES, **both)
    emit("datatrove", lambda: run(1), processes=1, **both)


def levanter(documents: Path, scratch: Path) -> None:
    """`build_caches` of its language model data configuration, from the same files."""
    from levanter.data.text.datasets import (
        DatasetComponent,
        LmDataConfig,
        UrlDatasetSourceConfig,
    )

    cache = str(scratch / "levanter")
    (documents / "tokenizer_config.json").write_text(
        json.dumps(
            {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS, "bos_token": EOS}
        )
    )

    def run() -> int:
        source = UrlDatasetSourceConfig(train_urls=files(documents))
        component = DatasetComponent(source=source, cache_dir=cache, flat_cache=False)
        data = LmDataConfig(
            tokenizer=str(documents),
            cache_dir=cache,
            components={"corpus": component},
            shuffle=False,
        )
        return int(data.build_caches("train")["corpus"].flat_field_length("input_ids"))

    emit("levanter", run, version=version("marin-levanter"))


if __name__ == "__main__":
    measures = {"datasets": datasets, "datatrove": datatrove, "levanter": levanter}
    measures[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
