"""Fit a scaling law of small models on this machine's CPU: four sizes, each at three budgets.

ponente run experiments/scaling_smoke.py            twelve runs, some minutes
ponente run experiments/scaling_smoke.py --smoke    a few steps of each
"""

from dataclasses import replace

import steps
from data.source import python_documentation
from models.config import TransformerConfig
from models.presets import tiny
from pipeline import Experiment, pod
from training.config import OptimizerConfig, TrainConfig

SMOKE = replace(tiny, vocab_size=512)  # run_200m's smoke model with fewer embedding parameters


def scaling_smoke(
    widths: tuple[int, ...] = (16, 24, 32, 48),
    flops: tuple[float, ...] = (7e10, 1.4e11, 2.8e11),  # budgets of the runs
    budgets: tuple[float, ...] = (1e12, 1e13),  # budgets to predict
    source: str = python_documentation(),  # 2 MB of English text that ships with CPython
    validation_tokens: int = 50_000,
    model: TransformerConfig = SMOKE,
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=5e-3, warmup=0.05),
    training: TrainConfig = TrainConfig(
        batch_size=2, compute_dtype="float32", evaluate_batches="all", evaluate_batch_size=32
    ),
    length: int = 128,
    hardware: str = "local",
) -> steps.Report:
    """The scaling law of a ladder of runs, each with a learning-rate schedule of its own length."""
    splits = (("validation", validation_tokens),)
    documents = steps.sample(source, tokens=-1, splits=splits)
    tokenizer = steps.train_tokenizer(documents, vocab_size=model.vocab_size)
    sequences = steps.block_shuffle(steps.tokenize(documents, tokenizer), length)

    def rung(shape: TransformerConfig, tokens: int) -> steps.Checkpoint:
        rate = optimizer.learning_rate * (model.embed / shape.embed) ** 0.5
        own = replace(optimizer, learning_rate=rate)
        return steps.train(sequences, shape, own, training, tokens=tokens, hardware=pod(hardware))

    sizes = [resized(model, width) for width in widths]
    return steps.scaling(steps.ladder(rung, sizes, flops=flops, length=length), budgets=budgets)


def resized(model: TransformerConfig, embed: int) -> TransformerConfig:
    """The model with another width, a multiple of 8, at the same depth and proportions."""
    heads = embed // 8
    mlp = model.mlp * embed // model.embed
    return replace(model, embed=embed, heads=heads, kv_heads=heads, head_size=8, mlp=mlp)


experiment = Experiment(
    scaling_smoke,
    smoke={"widths": (8, 16, 32), "flops": (1e9, 2e9, 4e9), "validation_tokens": 8_000},
)

if __name__ == "__main__":
    experiment.main()
