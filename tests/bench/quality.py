"""Training quality beside a plain PyTorch loop over `transformers`' Qwen3, on equal terms.

    python -m tests.bench.quality --corpus FOLDER --size smoke --steps 200 --seeds 3
    python -m tests.bench.quality --corpus FOLDER --size 10m --steps 40 --batch 8 --seq 256

Both loops get the same initial parameters, batches, AdamW, decay mask, clipping and schedule, in
float32, and are evaluated on the same held-out rows. One JSON object a seed, and one that sets the
largest difference of the validation losses beside their spread over seeds. Needs the extra
`oracle` (PyTorch with transformers) and a folder of Parquet files with a column `text`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pyarrow.parquet as pq

from models.config import TransformerConfig
from training.config import OptimizerConfig, Parallelism, TrainConfig

SIZES = {
    "smoke": {"layers": 4, "embed": 128, "heads": 4, "kv_heads": 2, "head_size": 32, "mlp": 352},
    "10m": {"layers": 8, "embed": 320, "heads": 5, "kv_heads": 5, "head_size": 64, "mlp": 864},
}
VOCAB = 2048
HELD_OUT = 64


def tokens(corpus: str, count: int) -> np.ndarray:
    """The first `count` ids of a corpus, by a byte-level tokenizer trained on its beginning."""
    from tokenizers import ByteLevelBPETokenizer

    texts: list[str] = []
    for path in sorted(Path(corpus).rglob("*.parquet")):
        for batch in pq.ParquetFile(path).iter_batches(columns=["text"], batch_size=256):
            texts += batch["text"].to_pylist()
            if sum(map(len, texts)) > 6 * count:
                break
        if sum(map(len, texts)) > 6 * count:
            break
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts[:1000], vocab_size=VOCAB, show_progress=False)
    ids = np.concatenate([each.ids for each in tokenizer.encode_batch(texts)])
    if len(ids) < count:
        raise SystemExit(f"{corpus}: expected {count:,} tokens, found {len(ids):,}")
    return ids[:count].astype(np.int32)


def ours(
    model: TransformerConfig, optimizer: OptimizerConfig, train: TrainConfig, rows: Any, held: Any
) -> tuple[Any, list[float], float]:
    """Initial parameters, training losses and the validation loss of this project's step."""
    from training.step.program import build_program

    program = build_program(model, optimizer, train, jax.devices()[:1], eos_id=0)
    state, losses = program.init(), []
    initial = jax.tree.map(np.asarray, state.model)
    for batch in rows:
        state, metrics = program.step(state, program.layout.place(batch, len(batch)))
        losses.append(float(metrics["loss"]))
    lengths = np.full(len(held), held.shape[1], np.int32)
    sizes = np.ones(model.vocab_size, np.int32)
    found = program.evaluation_step(state.eval_params, held, lengths, sizes)
    nll, counted, _ = (np.asarray(x, np.float64).sum() for x in found)
    return initial, losses, float(nll / counted)


def theirs(
    initial: Any,
    model: TransformerConfig,
    optimizer: OptimizerConfig,
    train: TrainConfig,
    rows: np.ndarray,
    held: np.ndarray,
) -> tuple[list[float], float]:
    """Training losses and the validation loss of a plain PyTorch loop."""
    import torch
    import transformers

    from tests.models.transformers_weights import fill
    from training.optimizer.lr_schedule import schedule

    net = transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            vocab_size=model.vocab_size,
            hidden_size=model.embed,
            intermediate_size=model.mlp,
            num_hidden_layers=model.layers,
            num_attention_heads=model.heads,
            num_key_value_heads=model.kv_heads,
            head_dim=model.head_size,
            rms_norm_eps=model.norm_epsilon,
            rope_theta=model.rope_base,
            tie_word_embeddings=model.tied,
        )
    ).float()
    fill(net, initial)
    decayed = {name for name, p in net.named_parameters() if p.ndim == 2 and "embed" not in name}
    groups = [
        {
            "params": [p for name, p in net.named_parameters() if (name in decayed) == decays],
            "weight_decay": optimizer.weight_decay if decays else 0.0,
        }
        for decays in (True, False)
    ]
    betas = (optimizer.beta1, optimizer.beta2)
    adam = torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=optimizer.epsilon)
    rate, losses = schedule(optimizer, train.steps), []
    for step, batch in enumerate(rows):
        ids = torch.from_numpy(batch.astype(np.int64))
        loss = net(input_ids=ids, labels=ids).loss
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), optimizer.clip_norm)
        for group in adam.param_groups:
            group["lr"] = float(rate(step))
        adam.step()
        losses.append(float(loss))
    with torch.no_grad():
        ids = torch.from_numpy(held.astype(np.int64))
        parts = [float(net(input_ids=x, labels=x).loss) for x in ids.split(8)]
    return losses, statistics.fmean(parts)


def measure(options: argparse.Namespace, seed: int, stream: np.ndarray) -> dict[str, Any]:
    """One seed: its parameters and its order of rows, both loops."""
    model = TransformerConfig(vocab_size=VOCAB, **SIZES[options.size])
    optimizer = OptimizerConfig(learning_rate=1e-3, warmup=options.steps // 10)
    train = TrainConfig(
        steps=options.steps,
        batch_size=options.batch,
        sequence_length=options.seq,
        compute_dtype="float32",
        seed=seed,
        parallel=Parallelism(sharding="replicated"),
    )
    rows = stream.reshape(-1, options.seq)
    held, rows = rows[:HELD_OUT], rows[HELD_OUT:]
    order = np.random.default_rng(seed).permutation(len(rows))
    batches = rows[order].reshape(options.steps, options.batch, options.seq)
    began = time.perf_counter()
    initial, our_losses, our_loss = ours(model, optimizer, train, batches, held)
    halfway = time.perf_counter()
    their_losses, their_loss = theirs(initial, model, optimizer, train, batches, held)
    apart = np.abs(np.subtract(our_losses, their_losses))
    return {
        "measure": "quality",
        "size": options.size,
        "parameters": model.parameter_count,
        "tokens": batches.size,
        "seed": seed,
        "first_loss": round(our_losses[0], 5),
        "ours": round(our_loss, 5),
        "theirs": round(their_loss, 5),
        "largest_difference_of_a_step": float(f"{apart.max():.2g}"),
        "ours_seconds": round(halfway - began, 1),
        "theirs_seconds": round(time.perf_counter() - halfway, 1),
    }


def main(arguments: list[str] | None = None) -> None:
    """Print one line per seed and a summary."""
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--corpus", required=True)
    flags.add_argument("--size", choices=SIZES, default="smoke")
    for name, default in (("steps", 200), ("batch", 8), ("seq", 256), ("seeds", 3)):
        flags.add_argument(f"--{name}", type=int, default=default)
    options = flags.parse_args(arguments)
    needed = (options.steps * options.batch + HELD_OUT) * options.seq
    stream, found = tokens(options.corpus, needed), []
    for seed in range(options.seeds):
        found.append(measure(options, seed, stream))
        print(json.dumps(found[-1]), flush=True)
    pairs = [(each["ours"], each["theirs"]) for each in found]
    summary = {
        "measure": "quality_summary",
        "size": options.size,
        "mean_difference": round(statistics.fmean(a - b for a, b in pairs), 5),
        "largest_difference": round(max(abs(a - b) for a, b in pairs), 5),
        "spread_over_seeds": round(statistics.pstdev(a for a, _ in pairs), 5),
    }
    print(json.dumps(summary), flush=True)


if __name__ == "__main__":
    main()
