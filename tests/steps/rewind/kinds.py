"""Small trainings of every kind, in one store, with the batches that the trainer was fed."""

from __future__ import annotations

import dataclasses
import json
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import steps
from models.shape.config import TransformerConfig
from tests.data.chat.chats import conversations, plain
from tests.steps.built import built
from training.config import OptimizerConfig, TrainConfig
from training.config.batch_schedule import BatchPhase

LENGTH = 32
MODEL = TransformerConfig(
    vocab_size=257, layers=1, embed=16, heads=2, kv_heads=1, head_size=8, mlp=32
)
TRAIN = TrainConfig(
    steps=10,
    batch_size=8,
    compute_dtype="float32",
    evaluate_every=100,
    checkpoint_every=4,
    keep_every=4,
)
OPTIMIZER = OptimizerConfig(learning_rate=1e-3, warmup=2)
WORDS = ("the", "of", "a", "to", "and", "in", "is", "it", "you", "that", "he", "was", "for", "on")


def text(number: int) -> str:
    rng = np.random.default_rng(number)
    words = rng.choice(WORDS, int(rng.integers(3, 40)))
    return f"document {number}: " + " ".join(words)


def write_lines(folder, files: int = 2, each: int = 60) -> str:
    """Files of JSON lines, whose ids are doc-N, and blank lines between some."""
    folder.mkdir()
    for file in range(files):
        rows = [
            json.dumps({"id": f"doc-{n}", "text": text(n)}) + "\n" * (1 + (n % 7 == 0))
            for n in range(file * each, (file + 1) * each)
        ]
        (folder / f"part-{file}.jsonl").write_text("".join(rows))
    return str(folder)


def write_parquet(folder, files: int = 2, each: int = 60) -> str:
    """Parquet files of row groups of 10 rows, without ids."""
    folder.mkdir()
    for file in range(files):
        texts = [text(n) for n in range(1000 + file * each, 1000 + (file + 1) * each)]
        table = pa.table({"text": texts})
        pq.write_table(table, folder / f"part-{file}.parquet", row_group_size=10)
    return str(folder)


def write_chats(folder) -> str:
    folder.mkdir()
    lines = (json.dumps({"messages": plain(chat)}) + "\n" for chat in conversations(60, seed=5))
    (folder / "chats.jsonl").write_text("".join(lines))
    return str(folder)


def write_integers(folder) -> str:
    folder.mkdir()
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 257, int(rng.integers(5, LENGTH))).tolist() for _ in range(60)]
    pq.write_table(pa.table({"input_ids": rows}), folder / "rows.parquet", row_group_size=12)
    return str(folder)


def upper(document: dict[str, Any]) -> list[str]:
    return [document["text"].upper(), document["text"]]


def words(document: dict[str, Any]) -> float:
    return float(len(document["text"].split()))


def prepared(root, lines: str) -> Any:
    """Documents of `lines` through every step that leaves some out."""
    texts = [json.dumps({"text": text(n)}) + "\n" for n in (3, 50, 90)]
    (root / "evaluation.jsonl").write_text("".join(texts))
    scored = steps.score_documents(steps.sample(lines, tokens=-1), by=words, bins=(0.0, 50.0))
    chosen = steps.sample(scored, tokens=800, splits=(("validation", 60),), min_score=8.0)
    unique = steps.deduplicate(steps.filter_documents(chosen, keep=short), near=False)
    return steps.decontaminate(unique, str(root / "evaluation.jsonl"), ngram=8)


def short(document: dict[str, Any]) -> bool:
    return words(document) < 38


def caches(root) -> dict[str, Any]:
    lines, table = write_lines(root / "lines"), write_parquet(root / "table")
    bytes_of = steps.byte_tokenizer()
    sampled = steps.sample(lines, tokens=800, splits=(("validation", 60),))
    groups = steps.sample(table, tokens=600, splits=(("validation", 60),), unit="row_group", seed=3)
    mapped = steps.map_documents(sampled, by=upper)
    return {
        "lines": steps.tokenize(sampled, bytes_of),
        "groups": steps.tokenize(groups, bytes_of),
        "mapped": steps.tokenize(mapped, bytes_of),
        "prepared": steps.tokenize(prepared(root, lines), bytes_of),
        "chats": steps.conversations(
            write_chats(root / "chats"),
            bytes_of,
            template="alpaca",
            sequence_length=3 * LENGTH,
            splits=(("validation", 0.1),),
        ),
        "integers": steps.integer_rows(
            write_integers(root / "integers"),
            vocab_size=257,
            sequence_length=LENGTH,
            splits=(("validation", 6),),
        ),
    }


def shuffled(cache: Any, length: int = LENGTH) -> Any:
    return steps.block_shuffle(cache, length, io_block_size=4, window_blocks=4)


def trainings(root) -> tuple[dict[str, Any], dict[str, Any]]:
    """By kind, the training and its sequences; those of "extended" are those of "lines"."""
    made = caches(root)
    names = ("lines", "groups", "mapped", "prepared", "integers")
    data = {name: shuffled(made[name]) for name in names}
    data["chats"] = shuffled(made["chats"], 3 * LENGTH)
    data["packed"] = shuffled(steps.pack(made["lines"], sequence_length=LENGTH))
    data["mix"] = steps.mix(
        (data["lines"], data["groups"]),
        weights=(1.0, 2.0),
        later=(steps.Phase(start_tokens=20 * LENGTH, weights=(3.0, 1.0)),),
    )
    scheduled = dataclasses.replace(
        TRAIN, batch_schedule=((3, 16),), length_schedule=((0, 2), (6, 1))
    )
    separate = dataclasses.replace(TRAIN, separate_documents=True)

    def train(name: str, config: TrainConfig = TRAIN) -> Any:
        return steps.train(data[name], MODEL, OPTIMIZER, config)

    found = {name: train(name) for name in data if name not in ("packed", "chats")}
    found["packed"], found["chats"] = train("packed", separate), train("chats", separate)
    found["scheduled"] = train("lines", scheduled)
    longer = dataclasses.replace(TRAIN, steps=14)
    found["extended"] = steps.extend(
        found["lines"], data["lines"], optimizer=OPTIMIZER, train=longer, at=8
    )
    found["warm"] = steps.warm_start(
        found["lines"], data["mix"], take="model", optimizer=OPTIMIZER, train=TRAIN
    )
    return found, data


def fed(store: Any, node: Any) -> tuple[steps.Checkpoint, list[np.ndarray]]:
    """A built training, and the batches that its trainer put on the devices, in order."""
    batches: list[np.ndarray] = []
    cut = BatchPhase.cut

    def seen(self: BatchPhase, read: np.ndarray, rows: np.ndarray) -> np.ndarray:
        found = cut(self, read, rows)
        batches.append(found.copy())
        return found

    with mock.patch.object(BatchPhase, "cut", seen):
        return built(store, node, steps.Checkpoint), batches
