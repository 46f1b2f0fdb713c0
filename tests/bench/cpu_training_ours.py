"""One run of this project's training loop on the CPU: `python -m tests.bench.cpu_training_ours`.

The path of a real run: `training.trainer.trainer.train` with a token cache on disk, its loader, the
compiled step of `training.step.program.build_program` and a checkpoint at the end, which comes
after the last measurement. Every setting that the two systems do not have to share is this
project's default.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

from tests.bench.cpu_training_measure import Clock, Options, emit, options_of

EOS = 0
_DOCUMENT = 1000


def prepare(work: Path, vocab: int, tokens: int) -> None:
    """Write a token cache of random documents, which is no part of the measurement."""
    from data.cache.token_shard import write_shard

    documents = -(-tokens // (_DOCUMENT + 1))
    ids = np.random.default_rng(0).integers(1, vocab, documents * _DOCUMENT).astype(np.uint16)
    lengths = np.full(documents, _DOCUMENT, np.int64)
    counts = write_shard(str(work / "cache"), [(ids, lengths)], vocab_size=vocab, eos_id=EOS)
    (work / "cache.txt").write_text(f"{counts.tokens} {counts.check}")


def run(options: Options) -> None:
    """Train and print one line."""
    began = time.perf_counter()
    from training.config.job import Listener
    from training.sharding.distributed import joined
    from training.trainer.trainer import train

    clock = Clock(options, imported=time.perf_counter() - began)

    class Timed(Listener):
        def progress(self, step: int, steps: int, row: dict[str, float]) -> None:
            clock.step(row["loss"])
            if step == steps:
                haliax = "haliax" if sys.version_info < (3, 12) else "marin-haliax"
                emit(clock.record("ponente", "jax", haliax))

    with joined(None):
        result = train(_job(options), Timed())
    assert result.compilations == 1


def _job(options: Options):
    from data.batches.dataset import DatasetSpec, TokenSource
    from data.cache.token_shard import TokenShard
    from models.shape.config import TransformerConfig
    from training.config import OptimizerConfig, TrainConfig
    from training.config.job import TrainJob

    work = Path(options.work)
    tokens, check = (work / "cache.txt").read_text().split()
    source = TokenSource(
        name="random",
        shards=(TokenShard(str(work / "cache"), int(tokens), check),),
        io_block_size=8,
        window_blocks=8,
        seed=0,
    )
    return TrainJob(
        model=TransformerConfig(
            vocab_size=options.vocab,
            layers=options.layers,
            embed=options.embed,
            heads=options.heads,
            kv_heads=options.heads,
            head_size=options.embed // options.heads,
            mlp=options.mlp,
            qk_norm=False,
        ),
        optimizer=OptimizerConfig(learning_rate=options.learning_rate, weight_decay=0.0),
        train=TrainConfig(
            steps=options.steps,
            batch_size=options.batch,
            sequence_length=options.position,
            compute_dtype="float32",
            **({"remat": options.remat} if options.remat else {}),
        ),
        data=DatasetSpec(
            sources=(source,),
            sequence_length=options.position,
            vocab_size=options.vocab,
            eos_id=EOS,
        ),
        splits=(),
        token_bytes=(1,) * options.vocab,
        checkpoint_directory=str(work / "checkpoints"),
    )


if __name__ == "__main__":
    run(options_of(sys.argv[1]))
