"""A 200M model on 4 billion tokens of FineWeb-edu, on a v6e-16; or the same in miniature.

    python experiments/run_200m.py plan                   what would run, on any machine
    python experiments/run_200m.py                        run it on a Ray cluster with the slice
    python experiments/run_200m.py --preset smoke         the identical graph on a laptop's CPU

The miniature reads the English text that every CPython carries (its documentation topics and
docstrings, PSF licence), so it needs no download.
"""

from __future__ import annotations

from dataclasses import dataclass

from data.source import fineweb_edu, python_documentation
from models import presets
from models.config import TransformerConfig
from pipeline import main, named, pod
from steps.artifacts import Report
from steps.block_shuffle import block_shuffle
from steps.evaluate import evaluate
from steps.generate import generate
from steps.report import report
from steps.sample import sample
from steps.tokenize_documents import tokenize
from steps.train import train as train_model
from steps.train_tokenizer import train_tokenizer
from training.config import OptimizerConfig, TrainConfig


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What differs between the run and its miniature; every field is a flag."""

    source: str = fineweb_edu("sample-10BT")
    tokenizer_tokens: int = 200_000_000
    tokens: int = 4_000_000_000
    validation_tokens: int = 10_000_000
    io_block_size: int = 64
    window_blocks: int = 1024
    model: TransformerConfig = presets.llama_200m
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=6e-4, schedule="wsd")
    train: TrainConfig = TrainConfig(steps=7_600, batch_size=128, sequence_length=4096)
    prompts: tuple[str, ...] = ("The three laws of thermodynamics", "Photosynthesis is")
    seed: int = 0
    hardware: str = "v6e-16"


SMOKE = Settings(
    source=python_documentation(),
    tokenizer_tokens=-1,
    tokens=-1,
    validation_tokens=20_000,
    io_block_size=4,
    window_blocks=64,
    model=presets.tiny,
    optimizer=OptimizerConfig(learning_rate=3e-3, schedule="wsd", warmup=0.05),
    train=TrainConfig(
        steps=800,
        batch_size=8,
        sequence_length=128,
        compute_dtype="float32",
        evaluate_every=100,
        checkpoint_every=50,
    ),
    prompts=("Return the", "This module"),
    hardware="local",
)


def graph(s: Settings) -> Report:
    """Documents to a report, ten lines."""
    some = named(sample(s.source, tokens=s.tokenizer_tokens, seed=s.seed), "sample_some")
    tokenizer = train_tokenizer(some, vocab_size=s.model.vocab_size)
    held_out = (("validation", s.validation_tokens),)
    documents = sample(s.source, tokenizer, tokens=s.tokens, splits=held_out, seed=s.seed)
    tokens = tokenize(documents, tokenizer)
    sequences = block_shuffle(
        tokens,
        sequence_length=s.train.sequence_length,
        io_block_size=s.io_block_size,
        window_blocks=s.window_blocks,
        seed=s.seed,
    )
    hardware = pod(s.hardware)
    model = train_model(
        sequences,
        model=s.model,
        optimizer=s.optimizer,
        train=s.train,
        sample_prompts=s.prompts,
        hardware=hardware,
    )
    scores = evaluate(model, tokens, hardware=hardware)
    text = generate(model, tokenizer, prompts=s.prompts, seed=s.seed)
    return report(model, scores, text)


if __name__ == "__main__":
    main(graph, presets={"full": Settings(), "smoke": SMOKE})
