"""Compare learning rates of a small model in short runs, and evaluate the best one.

ponente run experiments/learning_rate.py --smoke --rates 1e-3 3e-3 1e-2
"""

from dataclasses import replace

import steps
from data.source import fineweb_edu, python_documentation
from models.config import TransformerConfig
from models.presets import llama_200m, tiny
from pipeline import Experiment, pod, select, sweep
from training.config import OptimizerConfig, TrainConfig


def learning_rate(
    rates: tuple[float, ...] = (3e-4, 6e-4, 1.2e-3),  # around the rate of run_200m
    source: str = fineweb_edu("sample-10BT"),
    train_tokens: int = 500_000_000,  # an eighth of run_200m's ranks rates at a tenth of its cost
    validation_tokens: int = 10_000_000,
    model: TransformerConfig = llama_200m,
    optimizer: OptimizerConfig = OptimizerConfig(schedule="wsd"),
    training: TrainConfig = TrainConfig(batch_size=128),
    length: int = 4096,
    hardware: str = "v6e-16",
) -> tuple[steps.Report, steps.Scores]:
    """A page that compares all runs, and the scores of the run with the lowest validation loss."""
    splits, on = (("validation", validation_tokens),), pod(hardware)
    documents = steps.sample(source, tokens=train_tokens, splits=splits)
    tokenizer = steps.train_tokenizer(documents, vocab_size=model.vocab_size)
    sequences = steps.block_shuffle(steps.tokenize(documents, tokenizer), length)

    def candidate(rate: float) -> steps.Checkpoint:
        own = replace(optimizer, learning_rate=rate)
        return steps.train(sequences, model, own, training, epochs=1, hardware=on)

    models = sweep(candidate, rates)
    best = select(models, by="last.loss")
    return steps.compare(models), steps.evaluate(best, hardware=on)


experiment = Experiment(
    learning_rate,
    smoke={
        "rates": (1e-3, 1e-2),
        "source": python_documentation(),
        "train_tokens": 40_000,
        "validation_tokens": 8_000,
        "model": replace(tiny, vocab_size=512, layers=2, embed=32, head_size=8, mlp=48),
        "training": TrainConfig(batch_size=8, compute_dtype="float32", steps=8),
        "length": 64,
        "hardware": "local",
    },
)

if __name__ == "__main__":
    experiment.main()
