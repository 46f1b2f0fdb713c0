"""A run small enough for a test: two layers, a vocabulary of 64, sequences of 32 tokens."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from data.batches.dataset import DatasetSpec, TokenSource
from data.cache.token_shard import TokenShard, write_shard
from models.shape.config import TransformerConfig
from training.config import OptimizerConfig, Parallelism, TrainConfig
from training.config.job import Listener, MetricsRow, TrainJob, TrainResult
from training.evaluate.checkpoint_scorer import ScoreJob
from training.metrics.metrics_log import MEASURED, plain, read_history, read_log, tables
from training.step.program import Program, build_program

VOCAB = 64
EOS = 0
LENGTH = 32
BATCH = 8

MODEL = TransformerConfig(
    vocab_size=VOCAB, layers=2, embed=32, heads=4, kv_heads=2, head_size=8, mlp=64
)
FOUR_WAYS = dataclasses.replace(MODEL, heads=8, kv_heads=4)
"""The same with heads that four devices can divide."""
# Adam's first update is g / (|g| + epsilon): where a gradient happens to be near zero, the default
# epsilon turns rounding into an update of full size, and losses on two meshes drift apart.
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, warmup=2, epsilon=1e-5)
TRAIN = TrainConfig(
    steps=6,
    batch_size=BATCH,
    sequence_length=LENGTH,
    compute_dtype="float32",
    remat="none",
    parallel=Parallelism(sharding="replicated"),
    evaluate_every=4,
    checkpoint_every=1,
    keep_checkpoints=99,
)
HELD_OUT = {"validation": 600, "other": 350}
TOKEN_BYTES = tuple(i % 5 for i in range(VOCAB))


def split(group: int, sharding: str = "fsdp") -> Parallelism:
    """The state split over `group` devices."""
    return Parallelism(sharding=sharding, group=group)


@functools.cache
def program(
    devices: int = 1,
    padded: bool = False,
    masked: bool = False,
    model: TransformerConfig = MODEL,
    **changes: Any,
) -> Program:
    """The tiny run's program on the first `devices` devices; one object per set of changes."""
    train = dataclasses.replace(TRAIN, **changes)
    found = jax.devices()[:devices]
    return build_program(model, OPTIMIZER, train, found, eos_id=EOS, padded=padded, masked=masked)


def stored(tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Ids as a cache with a loss mask has them: `mask` says which predictions count."""
    ids = np.array(tokens)
    ids[:, 1:] += MODEL.vocab_size * (np.asarray(mask)[:, :-1] == 0)
    return ids


def random_tokens(seed: int, rows: int = BATCH) -> np.ndarray:
    """int32 [rows, LENGTH]."""
    return np.random.default_rng(seed).integers(0, VOCAB, (rows, LENGTH)).astype(np.int32)


def write_tokens(directory: str, tokens: int, seed: int) -> TokenShard:
    """A shard of documents of 49 random ids and EOS."""
    documents = tokens // 50
    ids = np.random.default_rng(seed).integers(1, VOCAB, documents * 49).astype(np.uint32)
    lengths = np.full(documents, 49)
    counts = write_shard(directory, iter([(ids, lengths)]), vocab_size=VOCAB, eos_id=EOS)
    return TokenShard(directory, counts.tokens, counts.check)


def dataset(*shards: TokenShard) -> DatasetSpec:
    """One source, shuffled in windows of 12 sequences."""
    source = TokenSource(name="tiny", shards=shards, io_block_size=4, window_blocks=3, seed=7)
    return DatasetSpec(sources=(source,), sequence_length=LENGTH, vocab_size=VOCAB, eos_id=EOS)


def make_job(root: str, **changes: Any) -> TrainJob:
    """A job on shards already written under `root` by `write_data`; `train` may be fields of it."""
    if isinstance(changes.get("train"), dict):
        changes["train"] = dataclasses.replace(TRAIN, **changes["train"])
    fields = {
        "model": MODEL,
        "optimizer": OPTIMIZER,
        "train": TRAIN,
        "data": dataset(
            TokenShard(f"{root}/train-0", 2000, ""), TokenShard(f"{root}/train-1", 1000, "")
        ),
        "splits": (("validation", (TokenShard(f"{root}/validation", 600, ""),)),),
        "token_bytes": TOKEN_BYTES,
        "checkpoint_directory": f"{root}/checkpoints",
    }
    return TrainJob(**{**fields, **changes})


def write_data(root: str) -> None:
    """The shards that `make_job` names."""
    write_tokens(f"{root}/train-0", 2000, 0)
    write_tokens(f"{root}/train-1", 1000, 1)
    for seed, (name, tokens) in enumerate(HELD_OUT.items(), 2):
        write_tokens(f"{root}/{name}", tokens, seed)


def score_job(root: str) -> ScoreJob:
    """Two held-out splits whole, of what `write_data` wrote."""
    shards = {name: (TokenShard(f"{root}/{name}", n, ""),) for name, n in HELD_OUT.items()}
    return ScoreJob(
        model=MODEL,
        train=TRAIN,
        splits=tuple(shards.items()),
        token_bytes=TOKEN_BYTES,
        eos_id=EOS,
    )


def run(
    job: TrainJob, listener: Listener | None = None, devices: int = 1, **changes: Any
) -> TrainResult:
    """Train a job, with other fields, on the first `devices` devices."""
    from training.trainer.trainer import train

    return train(dataclasses.replace(job, **changes), listener, devices=jax.devices()[:devices])


class Heard(Listener):
    """What a run told of itself; `methods` are called in place of its own."""

    def __init__(self, **methods: Callable[..., Any]) -> None:
        self.committed: list[tuple[int, str]] = []
        self.dropped: list[tuple[int, str]] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        vars(self).update(methods)

    def commit(self, step: int, path: str) -> None:
        self.committed.append((step, path))

    def drop(self, step: int, path: str) -> None:
        self.dropped.append((step, path))

    def event(self, kind: str, **fields: Any) -> None:
        self.events.append((kind, fields))


def rows(result: TrainResult, table: str = "history") -> list[MetricsRow]:
    """A table of a run, read from its metrics logs."""
    return tables(read_history(result.history))[table]


def entries(job: TrainJob, kind: str) -> list[MetricsRow]:
    """What an attempt at a job wrote of one kind."""
    return [plain(each) for each in read_log(job.metrics_directory) if each["kind"] == kind]


def learned(rows: list[MetricsRow]) -> list[MetricsRow]:
    """Rows without the columns that depend on the clock."""
    return [{name: row[name] for name in row if name not in MEASURED} for row in rows]


def small_state() -> dict[str, jax.Array]:
    """A state of one small array, to save."""
    return {"x": jnp.zeros(3)}


def like(tree: Any) -> Any:
    """Shapes and shardings of concrete arrays, to restore such a tree."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def assert_same_run(got: TrainResult, want: TrainResult) -> None:
    """Two runs learned the same: rows, evaluations and published parameters have the same bits."""
    from training.checkpoint.restore import load_model

    assert learned(rows(got)) == learned(rows(want))
    assert rows(got, "evaluations") == rows(want, "evaluations")
    assert equal(*(load_model(each.checkpoint, MODEL) for each in (got, want)))


def equal(a: Any, b: Any) -> bool:
    """Whether two trees have the same bits in every array."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)
