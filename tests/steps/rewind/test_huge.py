"""Rewind and trace of 1e12 tokens: an order, of which nothing is stored."""

from __future__ import annotations

import resource
import time

import numpy as np

from data.batches.dataset import Dataset, DatasetSpec, TokenSource
from data.batches.mixture import MixturePhase
from data.cache.token_shard import TokenShard
from training.config import TrainConfig
from training.config.batch_schedule import read_by, rows_read, step_that_reads

SHARDS, TOKENS = 20_000, 25_000_003  # of each of two sources: 1e12 tokens


def source(name: str) -> TokenSource:
    shards = tuple(TokenShard(f"/nowhere/{name}/{n}", TOKENS) for n in range(SHARDS))
    return TokenSource(name=name, shards=shards, io_block_size=64, window_blocks=1024, seed=1)


def test_a_document_of_a_huge_mixture_is_traced_and_its_step_rewound():
    """In seconds and some megabytes: nothing is walked, and no token is read."""
    spec = DatasetSpec(
        sources=(source("web"), source("code")),
        phases=(
            MixturePhase(start=0, weights=(0.7, 0.3)),
            MixturePhase(start=10**8, weights=(0.2, 0.8)),
        ),
        sequence_length=2048,
        vocab_size=50_000,
        eos_id=0,
    )
    train = TrainConfig(steps=480_000, batch_size=1024, sequence_length=2048)
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with Dataset(spec) as dataset:
        for step in (1, 123_456, 480_000):
            _, positions = read_by(train, step)
            rows = dataset.rows(np.array(positions)).tolist()
            for index in (0, 511, 1023):
                piece = dataset.pieces(rows[index])[0]
                found = dataset.positions(piece, rows_read(train, train.steps))
                sights = [step_that_reads(train, at)[1:] for at in found[rows[index]].tolist()]
                assert (step, index) in sights
    seconds = time.monotonic() - began
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert seconds < 60
    assert grown < 500
