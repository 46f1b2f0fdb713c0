"""One run of Levanter's trainer on the CPU: `python cpu_training_levanter.py OPTIONS`.

Run as a file by the interpreter of an environment with Levanter. Its defaults: gradient
checkpointing on, its default attention and loss, scanned layers; no tracker, no checkpoints.
Batches are random tokens made beforehand.
"""

from __future__ import annotations

import itertools
import logging
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("WANDB_MODE", "disabled")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from cpu_training_measure import Clock, Options, emit, options_of

POOL = 8


def run(options: Options) -> None:
    """Train and print one line."""
    logging.disable(logging.WARNING)
    began = time.perf_counter()
    import jax
    import jmp
    import levanter.main.train_lm  # what a user's script imports
    import levanter.trainer
    from haliax import Axis
    from levanter.checkpoint import CheckpointerConfig
    from levanter.models.llama import LlamaConfig
    from levanter.optim.config import AdamConfig
    from levanter.tracker import NoopConfig
    from levanter.trainer import Trainer, TrainerConfig

    clock = Clock(options, imported=time.perf_counter() - began)
    work = Path(options.work)
    config = TrainerConfig(
        id="cpu",
        train_batch_size=options.batch,
        num_train_steps=options.steps,
        mp=jmp.get_policy("f32"),
        tracker=NoopConfig(),
        require_accelerator=False,
        log_dir=work / "logs",
        checkpointer=CheckpointerConfig(base_path=str(work / "checkpoints")),
    )
    levanter.trainer.initialize(config)
    model = LlamaConfig(
        max_seq_len=options.position,
        hidden_dim=options.embed,
        intermediate_dim=options.mlp,
        num_layers=options.layers,
        num_heads=options.heads,
        num_kv_heads=options.heads,
        tie_word_embeddings=True,
    )
    optimizer = AdamConfig(learning_rate=options.learning_rate, weight_decay=0.0)

    def loss(model, example, *, key=None):
        return model.compute_next_token_loss(example, key=key, logsumexp_weight=0.0)

    with Trainer(config, optimizer.build(options.steps), loss, add_default_hooks=False) as trainer:
        key = jax.random.PRNGKey(0)
        vocab = Axis("vocab", options.vocab)
        state = trainer.initial_state(key, model_init=lambda: model.build(vocab, key=key))
        jax.block_until_ready(jax.tree.leaves(state))
        batches = itertools.cycle(_batches(options, trainer, model.max_Pos))
        for info in trainer.training_steps(state, batches):
            clock.step(float(info.loss))
    emit(clock.record("levanter", "marin-levanter", "jax"))


def _batches(options: Options, trainer, position):
    """A few batches as the trainer's own loader would give them."""
    import haliax as hax
    import jax.numpy as jnp
    import numpy as np
    from levanter.models.lm_model import LmExample

    numbers = np.random.default_rng(0)
    shape = (options.batch, options.position)
    made = []
    for _ in range(POOL):
        rows = jnp.asarray(numbers.integers(0, options.vocab, shape, dtype=np.int32))
        tokens = hax.named(rows, (trainer.TrainBatch, position))
        example = hax.vmap(
            lambda row: LmExample.causal(row, block_cross_document_attention=False),
            trainer.TrainBatch,
        )(tokens)
        made.append(hax.shard(example, trainer.compute_axis_mapping))
    return made


if __name__ == "__main__":
    run(options_of(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)  # its threads would be waited for
