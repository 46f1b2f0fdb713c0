"""Fault 1: kill -9 while documents are prepared, and the same preparation by several workers.

The graph filters, deduplicates, decontaminates, scores, samples and tokenises documents of five
files. A process that runs it is killed at some moment and started again until the graph is built.
What every step says then is what an undisturbed run in one process says, byte for byte.
"""

from __future__ import annotations

import functools
import hashlib
import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import steps
from pipeline import Experiment
from pipeline.graph.order import topological
from pipeline.graph.step import as_node
from pipeline.store import storage
from pipeline.store.manifest import load
from tests.faults.registry import Fault, trials

ROOT = Path(__file__).parents[2]
WORDS = [hashlib.md5(bytes([n]), usedforsecurity=False).hexdigest()[:6] for n in range(200)]
_FILES, _DOCUMENTS, _LENGTH = 5, 300, 2400  # words: 5 MB a file, so that each is one task


def write_source(folder: Path) -> None:
    """Documents of which one in ten is nearly another one, and one in thirty is in `test.jsonl`."""
    draw = random.Random(0)
    folder.mkdir(parents=True)
    question = " ".join(draw.choices(WORDS, k=20))
    (folder / "test.jsonl").write_text('{"text": "' + question + '"}\n')
    texts: list[str] = []
    for index in range(_FILES):
        for number in range(_DOCUMENTS):
            words = draw.choices(WORDS, k=_LENGTH)
            if number % 30 == 7:
                words[50:70] = question.split()
            elif number % 10 == 3 and texts:
                words = draw.choice(texts).split()
                words[draw.randrange(_LENGTH)] = "changed"
            texts.append(" ".join(words))
        mine = texts[-_DOCUMENTS:]
        ids = [f"{index}-{number}" for number in range(_DOCUMENTS)]
        pq.write_table(pa.table({"id": ids, "text": mine}), folder / f"{index}.parquet")


def even(document: dict[str, Any]) -> bool | str:
    return hashlib.sha256(document["id"].encode()).digest()[0] % 8 > 0 or "one in eight"


def share(document: dict[str, Any], letter: str) -> float:
    return document["text"].count(letter) / len(document["text"])


def prepare(folder: str = "source", tokens: int = -1) -> steps.TokenCache:
    """The tokens of a preparation."""
    kept = steps.filter_documents(f"{folder}/*.parquet", keep=even)
    unique = steps.deduplicate(kept)
    clean = steps.decontaminate(unique, f"{folder}/test.jsonl")
    scored = steps.score_documents(clean, by=functools.partial(share, letter="a"))
    splits = (("validation", 100_000),)
    documents = steps.sample(scored, tokens=tokens, splits=splits, min_score=0.05)
    return steps.tokenize(documents, steps.byte_tokenizer())


experiment = Experiment(prepare)


def command(folder: Path, store: Path, *flags: str) -> list[str]:
    """What builds the graph of `write_source`'s documents in a store."""
    this = str(Path(__file__))
    own = ["run", this, "--folder", str(folder), "--prefix", str(store), *flags]
    return [sys.executable, "-m", "pipeline.cli", *own]


def contents(folder: Path, store: Path) -> dict[str, Any]:
    """What every step of the graph says: content digest, result, and the bytes of every file."""
    found = {}
    for node in topological([as_node(prepare(str(folder)))]):
        path = storage.join(str(store), node.directory)
        published = load(path)
        assert published is not None, f"{node.label} was not published"
        files = {
            f"{shard.name}/{file.path}": storage.read_bytes(
                storage.join(published.home(path), shard.root, file.path)
            )
            for shard in published.shards
            for file in shard.files
        }
        result = {name: each for name, each in published.result.items() if name != "measured"}
        found[node.label] = (published.content, result, files)
    return found


def kill_while_preparing(seed: int, count: int, workspace: Path) -> dict[str, Any]:
    """Each trial kills a process once; a graph that was built is begun anew."""
    figures: Counter[str] = Counter()
    folder, whole, store = workspace / "source", workspace / "whole", workspace / "store"
    write_source(folder)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    begun = time.monotonic()
    subprocess.run(
        command(folder, whole, *_INLINE), env=environment, check=True, stdout=subprocess.DEVNULL
    )
    most, expected = time.monotonic() - begun, contents(folder, whole)

    def trial(number: int) -> None:
        wait = random.Random(number).uniform(0.3, 1.0) * most
        with subprocess.Popen(
            command(folder, store, *_INLINE),
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as process:
            try:
                process.wait(wait)
                figures["ended before"] += 1
            except subprocess.TimeoutExpired:
                process.kill()
        subprocess.run(
            command(folder, store, *_INLINE), env=environment, check=True, stdout=subprocess.DEVNULL
        )
        found = contents(folder, store)
        for name in expected:
            assert found[name] == expected[name], f"{name} says something else"
        shutil.rmtree(store)

    return {"trials": trials(seed, count, trial), **figures}


_INLINE = ("--executor", "inline")
FAULTS = {1: [Fault("kill -9 while documents are prepared", 2, 20, kill_while_preparing)]}
