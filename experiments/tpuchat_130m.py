"""tpuchat: 163.6M parameters (130.0M in matmuls) on one v6e chip, for less than $50.

ponente run experiments/tpuchat_130m.py                the model, 20 tokens per parameter
ponente run experiments/tpuchat_130m.py --published    with tpuchat's AdamW instead of Muon
ponente run experiments/tpuchat_130m.py --sweep        its rates, each on an eighth of the data
ponente run experiments/tpuchat_130m.py --ablations    one change of its model or optimizer each
ponente run experiments/tpuchat_130m.py --smoke        all of it on a laptop's CPU
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import steps
from data.source import fineweb_edu, python_documentation
from models.config import TransformerConfig
from models.presets import tpuchat_130m
from pipeline import Experiment, pod, select, sweep
from training.config import OptimizerConfig, TrainConfig
from training.recipes import tuned_muon

PUBLISHED = {
    "model": tpuchat_130m,
    "optimizer": OptimizerConfig(
        learning_rate=7e-4,  # from tpuchat's later sweep; its published run used 1e-4
        schedule="wsd",
        warmup=0.02,
        decay=0.5,
        min_ratio=0.0,
        moment_dtype="bfloat16",
    ),
}
START = replace(tpuchat_130m, embedding_std=1.0, head_std=0.001)  # as tpuchat's and row 36's
ABLATIONS: Mapping[str, Mapping[str, Any]] = {
    "as-published": {},
    "heads-8x128": {"heads": 8, "kv_heads": 2, "head_size": 128},  # the same number of parameters
    "kv-heads-2": {"kv_heads": 2},  # grouped queries
    "kv-heads-4": {"kv_heads": 4},  # every query head has its own keys and values
    "no-soft-cap": {"logit_soft_cap": None},
    "no-qk-norm": {"qk_norm": False},
    "relu2": {"mlp_kind": "relu2", "mlp": 4608},  # the parameters of the gated MLP of 3,072
    "muon": {"kind": "muon"},
    "lion": {"kind": "lion", "learning_rate": 1e-4, "weight_decay": 0.7},  # see OptimizerConfig
}


def changed(config: Any, changes: Mapping[str, Any]) -> Any:
    """The configuration with those changes that are fields of it."""
    own = {name: value for name, value in changes.items() if hasattr(config, name)}
    return replace(config, **own)


def tpuchat(
    source: str = fineweb_edu("sample-10BT"),
    train_tokens: int = 2_600_468_480,  # 20 per parameter in matmuls: 19,840 steps
    validation_tokens: int = 10_000_000,
    tokenizer_tokens: int = 400_000_000,  # 2 billion characters, as published
    model: TransformerConfig = START,
    optimizer: OptimizerConfig = tuned_muon(tpuchat_130m.embed, 64 * 2048),
    training: TrainConfig = TrainConfig(batch_size=64, milestones=(5_000, 10_000, 15_000)),
    length: int = 2048,
    rates: tuple[float, ...] = (),
    variants: tuple[str, ...] = (),
    short: int = 2_500,  # steps of each run of a sweep: 328M tokens
    hardware: str = "v6e-1",
) -> tuple[steps.Report, ...]:
    """The model's report; with rates or variants, pages that compare their short runs instead."""
    splits, on = (("validation", validation_tokens),), pod(hardware)
    documents = steps.sample(source, tokens=train_tokens, splits=splits)
    tokenizer = steps.train_tokenizer(
        documents,
        vocab_size=model.vocab_size,
        tokens=tokenizer_tokens,
        pre_tokenizer="nanochat",
    )
    sequences = steps.block_shuffle(steps.tokenize(documents, tokenizer), length)

    def candidate(changes: Mapping[str, Any]) -> steps.Checkpoint:
        shape, by = changed(model, changes), changed(optimizer, changes)
        few = replace(training, steps=short, milestones=())
        return steps.train(sequences, shape, by, few, hardware=on)

    pages = []
    if rates:
        models = sweep(candidate, {f"{rate:g}": {"learning_rate": rate} for rate in rates})
        pages += [steps.compare(models), steps.report(select(models, by="last.loss"))]
    if variants:
        pages += [steps.compare(sweep(candidate, {name: ABLATIONS[name] for name in variants}))]
    if not pages:
        trained = steps.train(sequences, model, optimizer, training, epochs=1, hardware=on)
        pages = [steps.report(trained, steps.evaluate(trained, hardware=on))]
    return tuple(pages)


experiment = Experiment(
    tpuchat,
    published=PUBLISHED,
    sweep={**PUBLISHED, "rates": (1e-4, 2e-4, 4e-4, 7e-4, 1.2e-3)},
    ablations={**PUBLISHED, "variants": tuple(ABLATIONS)},
    smoke={
        **PUBLISHED,
        "source": python_documentation(),
        "train_tokens": 40_000,
        "validation_tokens": 8_000,
        "tokenizer_tokens": 40_000,
        "model": replace(tpuchat_130m, vocab_size=512, layers=2, embed=32, head_size=8, mlp=48),
        "training": TrainConfig(batch_size=8, compute_dtype="float32"),
        "length": 64,
        "rates": (1e-3, 3e-3, 1e-2),
        "variants": ("as-published", "kv-heads-4"),
        "short": 8,
        "hardware": "local",
    },
)

if __name__ == "__main__":
    experiment.main()
