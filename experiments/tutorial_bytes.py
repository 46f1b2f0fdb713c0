"""The tutorial: train a byte-level GPT of 55,000 parameters on the English text inside CPython.

ponente run experiments/tutorial_bytes.py            on a CPU, with completions as it trains
ponente run experiments/tutorial_bytes.py --smoke    the same graph in seconds

docs/tutorial.md explains it line by line.
"""

from dataclasses import replace

import steps
from data.source import python_documentation
from models.config import TransformerConfig
from models.presets import bytes_tiny
from pipeline import Experiment, pod
from training.config import OptimizerConfig, TrainConfig


def tutorial_bytes(
    source: str = python_documentation(),  # 2 MB of English that needs no download
    validation_bytes: int = 400_000,  # a fifth, as bitesizedGPT keeps
    model: TransformerConfig = bytes_tiny,  # bitesizedGPT's shape, for 256 bytes and EOS
    optimizer: OptimizerConfig = OptimizerConfig(  # bitesizedGPT's: Adam at a constant rate
        learning_rate=1e-3, schedule="constant", beta2=0.999, weight_decay=0.0
    ),
    training: TrainConfig = TrainConfig(
        steps=5_000,  # 12 epochs, in minutes; bitesizedGPT trains for 50,000 steps
        batch_size=32,  # bitesizedGPT's, 4,096 bytes per step
        compute_dtype="float32",  # a CPU is no faster in bfloat16
        evaluate_every=500,  # ten completions during training
    ),
    length: int = 128,  # bytes that the model sees, two lines of text: bitesizedGPT's
    prompts: tuple[str, ...] = ("Return the ", "The Zen of Python"),
    seed: int = 0,
    hardware: str = "local",
) -> tuple[steps.Report, steps.Checkpoint]:
    """A page with curves and completions, and the trained model."""
    alphabet = steps.byte_tokenizer()
    splits, on = (("validation", validation_bytes // 4),), pod(hardware)  # counts 4 bytes as 1
    book = steps.sample(source, tokens=-1, splits=splits, seed=seed)  # -1: all other documents
    sequences = steps.block_shuffle(steps.tokenize(book, alphabet), length, seed=seed)
    trained = steps.train(
        sequences, model, optimizer, training, sample_prompts=prompts[:1], hardware=on
    )
    scores = steps.evaluate(trained, hardware=on)
    text = steps.generate(trained, prompts=prompts, seed=seed, hardware=on)
    return steps.report(trained, scores, text), trained


experiment = Experiment(
    tutorial_bytes,
    published={"training": TrainConfig(steps=50_000, batch_size=32, compute_dtype="float32")},
    smoke={
        "validation_bytes": 20_000,
        "model": replace(bytes_tiny, layers=1),
        "training": TrainConfig(
            steps=8, batch_size=8, compute_dtype="float32", evaluate_every=4, evaluate_batches=1
        ),
    },
)

if __name__ == "__main__":
    experiment.main()
