"""Training on an NVIDIA GPU, beside plain PyTorch on the same shape, batch and optimizer.

    python -m tests.bench.gpu_training                     tpuchat_130m and llama_200m, both systems
    python -m tests.bench.gpu_training --models tiny --batch 8 --length 128 --steps 12 --float32

One JSON object a run, each a process of its own. Ours is `training.trainer.trainer.train` with a
cache of random tokens on disk, every setting at its default. PyTorch's is an eager module of the
same shape under `torch.compile`: bfloat16 autocast, `scaled_dot_product_attention`, fused AdamW,
float32 parameters, batches that are on the device already. Both compute in bfloat16 and keep
parameters and moments in float32. `mfu` divides the model's FLOPs with causal attention by the
chip's dense bfloat16 peak. `predicted_ms` is what `plan` says of this chip.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

WARM_UP = 5
RATE = 3e-4


def measured(name: str, ends: list[float], losses: list[float], tokens: int) -> dict[str, Any]:
    """The line of a run whose steps ended at these times."""
    walls = [after - before for before, after in pairwise(ends)][WARM_UP - 1 :]
    seconds = statistics.median(walls)
    return {
        "system": name,
        "step_ms": round(1e3 * seconds, 2),
        "worst_ms": round(1e3 * max(walls), 2),
        "tokens_per_second": round(tokens / seconds),
        "first_step_s": round(ends[0], 1),
        "losses": [round(losses[0], 4), round(losses[-1], 4)],
    }


def ponente(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """One run of our training loop."""
    began = time.perf_counter()
    import jax

    from data.batches.dataset import DatasetSpec, TokenSource
    from data.cache.token_shard import TokenShard
    from models import presets
    from pipeline.accelerators import chip_of
    from tests.bench.cpu_training_ours import EOS, prepare
    from training.config import OptimizerConfig, TrainConfig
    from training.config.job import Listener, TrainJob
    from training.cost.resolved_run import resolve_run
    from training.cost.step_time import forecast
    from training.step.program import described
    from training.trainer.trainer import train

    model = getattr(presets, options.model)
    tokens = options.batch * options.length
    prepare(work, model.vocab_size, tokens * (options.steps + 1))
    count, check = (work / "cache.txt").read_text().split()
    shard = TokenShard(str(work / "cache"), int(count), check)
    source = TokenSource(name="random", shards=(shard,), io_block_size=8, window_blocks=8, seed=0)
    config = TrainConfig(
        steps=options.steps,
        batch_size=options.batch,
        sequence_length=options.length,
        separate_documents=options.documents,
        log_every=1,
        **({"compute_dtype": "float32"} if options.float32 else {}),
    )
    job = TrainJob(
        model=model,
        optimizer=OptimizerConfig(learning_rate=RATE),
        train=config,
        data=DatasetSpec(
            sources=(source,),
            sequence_length=options.length,
            vocab_size=model.vocab_size,
            eos_id=EOS,
        ),
        splits=(),
        token_bytes=(1,) * model.vocab_size,
        checkpoint_directory=str(work / "checkpoints"),
    )
    ends: list[float] = []
    rows: list[dict[str, float]] = []

    class Timed(Listener):
        def progress(self, step: int, steps: int, row: dict[str, float]) -> None:
            ends.append(time.perf_counter() - began)
            rows.append(row)

    result = train(job, Timed())
    record = measured("ponente", ends, [row["loss"] for row in rows], tokens)
    device = jax.devices()[0]
    if (chip := chip_of(device.device_kind)) is not None:
        found = resolve_run(model, job.optimizer, config, described([device]))
        step = forecast(found.largest, chip)
        record |= {
            "predicted_ms": round(1e3 * step.seconds, 2),
            "range_ms": [round(1e3 * each, 1) for each in step.range],
        }
        record["mfu"] = round(step.mfu * step.seconds * 1e3 / record["step_ms"], 4)
    stats = device.memory_stats() or {}
    return record | {
        "peak_gib": round(stats.get("peak_bytes_in_use", 0) / 2**30, 2),
        "estimated_gib": round(sum(result.memory.values()) / 2**30, 2),
        "notes": list(result.notes),
        "device": result.devices,
        "version": jax.__version__,
    }


def pytorch(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """The same shape in PyTorch."""
    began = time.perf_counter()
    import torch
    from torch import nn
    from torch.nn import functional as F

    from models import presets

    shape = getattr(presets, options.model)
    heads, groups, size, embed = shape.heads, shape.kv_heads, shape.head_size, shape.embed
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.RMSNorm(embed) for _ in range(2))
            self.query_norm, self.key_norm = nn.RMSNorm(size), nn.RMSNorm(size)
            self.qkv = nn.Linear(embed, (heads + 2 * groups) * size, bias=False)
            self.out = nn.Linear(heads * size, embed, bias=False)
            self.gate_up = nn.Linear(embed, 2 * shape.mlp, bias=False)
            self.down = nn.Linear(shape.mlp, embed, bias=False)

        def forward(self, x: Any, cos: Any, sin: Any) -> Any:
            b, n, _ = x.shape
            parts = self.qkv(self.norms[0](x)).view(b, n, heads + 2 * groups, size).transpose(1, 2)
            q, k, v = parts.split((heads, groups, groups), dim=1)
            if shape.qk_norm:
                q, k = self.query_norm(q), self.key_norm(k)
            q, k = (y * cos + torch.cat(y.chunk(2, -1)[::-1], -1) * sin for y in (q, k))
            q, k = q.to(v.dtype), k.to(v.dtype)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != groups)
            x = x + self.out(y.transpose(1, 2).reshape(b, n, -1))
            gate, up = self.gate_up(self.norms[1](x)).chunk(2, -1)
            return x + self.down(F.silu(gate) * up)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(shape.vocab_size, embed)
            self.blocks = nn.ModuleList(Block() for _ in range(shape.layers))
            self.norm = nn.RMSNorm(embed)
            self.head = nn.Linear(embed, shape.vocab_size, bias=False)
            for p in self.parameters():
                if p.ndim == 2:
                    nn.init.normal_(p, std=0.02)
            if shape.tied:
                self.head.weight = self.embed.weight

        def forward(self, ids: Any, cos: Any, sin: Any) -> Any:
            x = self.embed(ids[:, :-1])
            for block in self.blocks:
                x = block(x, cos, sin)
            logits = self.head(self.norm(x)).float()
            if shape.logit_soft_cap:
                logits = shape.logit_soft_cap * torch.tanh(logits / shape.logit_soft_cap)
            return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    model = Model().cuda()
    step_of = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), fused=True)
    angles = torch.outer(
        torch.arange(options.length, device="cuda"),
        1e4 ** (-torch.arange(0, size, 2, device="cuda") / size),
    )
    cos, sin = angles.cos().repeat(1, 2), torch.cat((-angles.sin(), angles.sin()), -1)
    tokens = options.batch * options.length
    draw = torch.Generator("cuda").manual_seed(0)
    ends, losses = [], []
    for _ in range(options.steps):
        shape_of = (options.batch, options.length + 1)
        ids = torch.randint(1, shape.vocab_size, shape_of, device="cuda", generator=draw)
        with torch.autocast("cuda", torch.bfloat16, enabled=not options.float32):
            loss = step_of(ids, cos, sin)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        ends.append(time.perf_counter() - began)
    return measured("pytorch", ends, losses, tokens) | {
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "device": torch.cuda.get_device_name(),
        "version": torch.__version__,
    }


SYSTEMS = {"ponente": ponente, "pytorch": pytorch}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["tpuchat_130m", "llama_200m"])
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=SYSTEMS)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--float32", action="store_true", help="compute in float32")
    parser.add_argument("--documents", action="store_true", help="attention within documents, ours")
    parser.add_argument("--one", nargs=2, metavar=("SYSTEM", "MODEL"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        system, options.model = options.one
        with tempfile.TemporaryDirectory() as work:
            record = SYSTEMS[system](options, Path(work))
        same = {"model": options.model, "batch": options.batch, "length": options.length}
        print(json.dumps(same | record), flush=True)
        return
    for model in options.models:
        for system in options.systems:
            again = [sys.executable, "-m", "tests.bench.gpu_training", *sys.argv[1:]]
            subprocess.run([*again, "--one", system, model], check=False)


if __name__ == "__main__":
    main()
