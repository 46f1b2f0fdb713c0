"""Recipes of fixed sizes: a track of modded-nanogpt, Marin's ladder, and Llama with AdamW."""

from __future__ import annotations

import dataclasses
from typing import Any

from models.shape.config import TransformerConfig
from models.shape.presets import llama_3_2_1b, llama_200m
from pipeline.errors import InputError
from training.config import OptimizerConfig
from training.recipes.nanochat import BATCH
from training.recipes.recipe import UNCLIPPED, Recipe, assemble, part


def speedrun() -> Recipe:
    """Row 36 of modded-nanogpt's track 3: tuned Muon, and Adam with three rates (2026-06-11).

    Published: 3.2787 nats a token on FineWeb's validation split, mean of 10 runs.
    """
    code, row = "records/track_3_optimization/train_gpt_simple.py", "row 36 of its table (#323)"
    sizes = {"layers": 12, "embed": 768, "heads": 6, "kv_heads": 6, "head_size": 128, "mlp": 3072}
    kinds = {"mlp_kind": "relu2", "biases": True, "embedding_norm": True, "tied": False}
    adam = {"beta1": 0.8, "beta2": 0.95, "epsilon": 1e-10}
    rates = {"embedding": 0.7, "head": 0.004, "vectors": 0.015}
    return assemble(
        "speedrun",
        "the head's bias, rotation of half of the features, weights of the norm after the "
        "embedding (and no weights of the norms of queries and keys), 15 x / sqrt(x^2 + 15^2) as "
        "the cap of logits, 12 Newton-Schulz iterations with (2, -1.5, 0.5), a head of zeros",
        part("model", "GPT-2's tokenizer, padded to 50,304", vocab_size=50_257, vocab_multiple=128),
        part("model", code, **sizes, **kinds, rope_base=1024.0, logit_soft_cap=15.0),
        part("model", "0.12 = its square / sqrt(128)", query_key_scale=(0.12**2 * 128) ** 0.25),
        part("model", "sqrt(0.33)", init_scale=0.33**0.5),
        part("model", code, embedding_std=1.0, head_std=1e-9, zero_outputs=True),
        part("optimizer", row, learning_rate=0.025, weight_decay=0.05, **adam),
        part("optimizer", code, kind="muon", muon_momentum=0.95, muon_rms=None),
        part("optimizer", code, schedule="wsd", warmup=0.0, decay=0.7, min_ratio=0.0),
        part("optimizer", "it clips nothing", clip_norm=UNCLIPPED),
        *(
            part(f"optimizer.{n}", row, learning_rate=r, weight_decay=0.001)
            for n, r in rates.items()
        ),
        part("train", code, batch_size=512, sequence_length=1024, steps=3250),
    )


def tuned_muon(width: int, batch: int) -> OptimizerConfig:
    """`speedrun`'s optimizer for another width and another batch in tokens.

    All rates times sqrt(batch / 2^19), and those of tables and head times (width / 768)^-0.5, as
    `nanochat` has them.
    """
    own, more = speedrun().optimizer, (batch / BATCH) ** 0.5

    def changed(config: Any, factor: float) -> Any:
        return dataclasses.replace(config, learning_rate=factor * config.learning_rate)

    narrow = more * (width / 768) ** -0.5
    factors = {"embedding": narrow, "head": narrow, "vectors": more}
    adam = {name: changed(getattr(own, name), by) for name, by in factors.items()}
    return dataclasses.replace(changed(own, more), **adam)


_SIZES = ("layers", "embed", "heads", "kv_heads", "head_size", "mlp")
_MARIN = {  # shape; batch and steps; rates of Muon and Adam, momentum, epsilon, clip, decay
    "130m": ((6, 512, 8, 8, 64, 1792), (128, 4959), (0.016, 0.0032, 0.95, 1e-15, 1.0, 0.8)),
    "300m": ((12, 768, 12, 12, 64, 2688), (128, 11_444), (0.008, 0.0024, 0.98, 1e-15, 1.0, 0.8)),
    "520m": ((24, 1024, 16, 8, 64, 3584), (128, 19_836), (0.008, 0.0024, 0.98, 1e-25, 1.0, 1.0)),
    "1.2b": ((16, 2048, 16, 8, 128, 7168), (256, 22_888), (0.004, 0.0012, 0.98, 1e-15, 2.0, 1.0)),
}
MARIN_SIZES = tuple(_MARIN)


def marin_qwen3(size: str) -> Recipe:
    """Muon of Marin's Qwen3 ladder on FineWeb-edu: "130m", "300m", "520m" or "1.2b".

    Published: 1.1663, 1.0582, 0.9888 and 0.9356 bits a byte of c4_en. MuonH, with 1.1661, 1.0564,
    0.9902 and 0.9284, keeps the norm of each matrix, for which there is no field.
    """
    shape, (batch, steps), (muon, adam, momentum, epsilon, clip, decay) = _one(_MARIN, size)
    code = "marin experiments/speedrun/muon_qwen3_scaling/muon_sweep.py"
    schedule = {"schedule": "linear"} if decay == 1.0 else {"schedule": "wsd", "decay": decay}
    return assemble(
        f"marin_qwen3 {size}",
        "clipping of Adam's gradients alone",
        part("model", "Llama 3's tokenizer", vocab_size=128_256),
        part("model", code, **dict(zip(_SIZES, shape, strict=True))),
        part("model", "marin experiments/llama.py", tied=False, norm_epsilon=1e-5),
        part("optimizer", code, kind="muon", learning_rate=adam, muon_learning_rate=muon),
        part("optimizer", code, muon_momentum=momentum, beta1=0.8, beta2=0.98, epsilon=epsilon),
        part("optimizer", code, **schedule, warmup=0.0, min_ratio=0.0, clip_norm=clip),
        part("optimizer", code, weight_decay=0.1, muon_rms=None),
        part("optimizer.head", "levanter/optim/config.py: all but tables", weight_decay=0.1),
        part("train", code, batch_size=batch, sequence_length=4096, steps=steps),
    )


_LLAMA: dict[str, tuple[TransformerConfig, str, dict[str, Any], tuple[int, int]]] = {
    "200m": (llama_200m, "run_200m", {"learning_rate": 6e-4, "schedule": "wsd"}, (128, 7629)),
    "1b": (llama_3_2_1b, "nanopt_1b", {"learning_rate": 3e-4, "warmup": 1000.0}, (256, 19_073)),
}


def llama(size: str) -> Recipe:
    """AdamW for a Llama: "200m" of `run_200m` (GPT-3 small's rate) or "1b" of `nanopt_1b`."""
    model, name, optimizer, (batch, steps) = _one(_LLAMA, size)
    code = f"experiments/{name}.py"
    return assemble(
        f"llama {size}",
        "nothing",
        part("model", "models/presets.py", **vars(model)),
        part("optimizer", code, **optimizer),
        part("train", code, batch_size=batch, sequence_length=4096, steps=steps),
    )


def _one(sizes: dict[str, Any], size: str) -> Any:
    if size not in sizes:
        raise InputError(f"size of a recipe: expected one of {', '.join(sizes)}, found {size!r}")
    return sizes[size]
