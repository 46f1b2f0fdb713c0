"""Compare optimizers, schedules and shapes of small models at equal tokens, over several seeds.

ponente run experiments/recipes.py --rates      learning rates of each optimizer, one seed
ponente run experiments/recipes.py              the variants at the best rates, three seeds each
ponente run experiments/recipes.py --smoke      a few steps of each
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import steps
from data.source import fineweb_edu, python_documentation
from experiments.tpuchat_130m import changed
from models.config import TransformerConfig
from models.presets import tiny
from pipeline import Experiment, pod, sweep
from training.config import OptimizerConfig, TrainConfig

SIZES: Mapping[str, TransformerConfig] = {
    "0.4M": replace(tiny, embed=64, heads=2, kv_heads=1, mlp=192),
    "1.0M": tiny,
}
OPTIMIZERS: Mapping[str, Mapping[str, Any]] = {
    "adamw": {"kind": "adamw"},
    "muon": {"kind": "muon"},
    "lion": {"kind": "lion", "weight_decay": 0.5},
}
RATES: Mapping[str, tuple[float, ...]] = {
    "adamw": (1.25e-3, 2.5e-3, 5e-3, 1e-2, 2e-2),
    "muon": (2.5e-3, 5e-3, 1e-2, 2e-2),
    "lion": (5e-4, 1e-3, 2e-3, 4e-3),
}
BEST: Mapping[str, float] = {"adamw": 5e-3, "muon": 1e-2, "lion": 1e-3}  # found by preset `rates`
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    **{name: {**by, "learning_rate": BEST[name]} for name, by in OPTIMIZERS.items()},
    "cosine": {"schedule": "cosine"},
    "no-qk-norm": {"qk_norm": False},
    "heads-of-16": {"head_size": 16},
    "tables-decay": {"decay_tables": True},
}


def recipes(
    source: str = fineweb_edu("sample-10BT"),
    train_tokens: int = 3_000_000,
    validation_tokens: int = 100_000,
    unit: Literal["document", "row_group"] = "row_group",  # reads little more than its sample
    sizes: tuple[str, ...] = tuple(SIZES),
    variants: tuple[str, ...] = tuple(VARIANTS),
    seeds: tuple[int, ...] = (0, 1, 2),
    search: bool = False,  # train the learning rates instead of the variants
    optimizer: OptimizerConfig = OptimizerConfig(
        learning_rate=BEST["adamw"], schedule="wsd", warmup=0.05, min_ratio=0.0
    ),
    training: TrainConfig = TrainConfig(
        batch_size=16,
        steps=600,
        compute_dtype="float32",
        evaluate_batches="all",
        evaluate_batch_size=32,
    ),
    length: int = 128,
    hardware: str = "local",
) -> tuple[steps.Report, ...]:
    """A page for each size, with the curve and the final loss of every run."""
    splits, on = (("validation", validation_tokens),), pod(hardware)
    documents = steps.sample(source, tokens=train_tokens, splits=splits, unit=unit)
    tokenizer = steps.train_tokenizer(documents, vocab_size=tiny.vocab_size)
    sequences = steps.block_shuffle(steps.tokenize(documents, tokenizer), length)

    def page(size: str) -> steps.Report:
        def candidate(changes: Mapping[str, Any]) -> steps.Checkpoint:
            shape, by = changed(SIZES[size], changes), changed(optimizer, changes)
            if "head_size" in changes:  # keep the number of parameters
                more = tiny.head_size // shape.head_size
                shape = replace(shape, heads=more * shape.heads, kv_heads=more * shape.kv_heads)
            own = replace(training, seed=changes["seed"])
            return steps.train(sequences, shape, by, own, hardware=on)

        return steps.compare(sweep(candidate, _searched() if search else _varied(variants, seeds)))

    return tuple(page(size) for size in sizes)


def _searched() -> dict[str, Mapping[str, Any]]:
    return {
        f"{name}-{rate:g}": {**OPTIMIZERS[name], "learning_rate": rate, "seed": 0}
        for name, rates in RATES.items()
        for rate in rates
    }


def _varied(variants: tuple[str, ...], seeds: tuple[int, ...]) -> dict[str, Mapping[str, Any]]:
    return {
        f"{name}-{seed}": {**VARIANTS[name], "seed": seed} for name in variants for seed in seeds
    }


experiment = Experiment(
    recipes,
    rates={"search": True},
    smoke={
        "source": python_documentation(),
        "train_tokens": 40_000,
        "validation_tokens": 8_000,
        "unit": "document",
        "sizes": ("0.4M",),
        "variants": ("adamw", "muon"),
        "seeds": (0,),
        "training": TrainConfig(batch_size=8, steps=4, compute_dtype="float32"),
    },
)

if __name__ == "__main__":
    experiment.main()
