"""nanoPT: Llama 3.2 1B's architecture on 20 billion tokens of FineWeb-edu, on eight chips.

ponente plan experiments/nanopt_1b.py              sizes, memory and time
ponente plan experiments/nanopt_1b.py --published  with nanoPT's AdamW instead of Muon
ponente run experiments/nanopt_1b.py --smoke       the same graph on a laptop's CPU
"""

from dataclasses import replace
from typing import Literal

import steps
from data.source import fineweb_edu, python_documentation
from models.config import TransformerConfig
from models.presets import llama_3_2_1b
from pipeline import Experiment, pod
from training.config import OptimizerConfig, TrainConfig
from training.recipes import llama, marin_qwen3


def nanopt_1b(
    source: str = fineweb_edu("sample-100BT"),
    train_tokens: int = 20_000_000_000,
    validation_tokens: int = 100_000_000,
    test_tokens: int = 100_000_000,
    unit: Literal["document", "row_group"] = "row_group",  # reads only a fifth of the source
    tokenizer_tokens: int | None = 200_000_000,  # about 1 GB of text, which fits a host's memory
    model: TransformerConfig = llama_3_2_1b,
    # Muon with the rates that Marin tuned for this batch, depth and width.
    optimizer: OptimizerConfig = marin_qwen3("1.2b").optimizer,
    training: TrainConfig = TrainConfig(
        batch_size=256,  # 1,048,576 tokens per step
        microbatches=8,  # four sequences per chip: no matmul is recomputed
        separate_documents=True,  # attention as with one document per sequence, without padding
        keep_every=1_000,
    ),
    length: int = 4096,
    prompts: tuple[str, ...] = ("The history of science", "To solve this equation"),
    hardware: str = "v6e-8",
    evaluation_hardware: str = "v6e-1",
) -> tuple[steps.Report, steps.Scores]:
    """The report and the test scores of a model that a second job evaluates while it trains."""
    splits = (("validation", validation_tokens), ("test", test_tokens))
    on, evaluation_on = pod(hardware), pod(evaluation_hardware)
    documents = steps.sample(source, tokens=train_tokens, splits=splits, unit=unit)
    tokenizer = steps.train_tokenizer(
        documents, vocab_size=model.vocab_size, tokens=tokenizer_tokens
    )
    tokens = steps.tokenize(documents, tokenizer)
    sequences = steps.block_shuffle(tokens, length)
    trained = steps.train(sequences, model, optimizer, training, epochs=1, hardware=on)
    followed = steps.follow(trained, tokens, sequences=100, hardware=evaluation_on)
    final = steps.evaluate(trained, splits=("test",), hardware=on)
    text = steps.generate(trained, prompts=prompts, hardware=on)
    return steps.report(trained, followed, text), final


experiment = Experiment(
    nanopt_1b,
    published={"optimizer": llama("1b").optimizer},
    smoke={
        "source": python_documentation(),
        "train_tokens": 40_000,
        "validation_tokens": 8_000,
        "test_tokens": 8_000,
        "unit": "document",
        "tokenizer_tokens": 40_000,
        "model": replace(
            llama_3_2_1b, vocab_size=512, layers=2, embed=32, heads=4, kv_heads=2, mlp=48
        ),
        "optimizer": OptimizerConfig(learning_rate=3e-3, warmup=2),
        "training": TrainConfig(
            batch_size=8, separate_documents=True, compute_dtype="float32", keep_every=20
        ),
        "length": 64,
        "prompts": ("Return the",),
        **{"hardware": "local", "evaluation_hardware": "local"},
    },
)

if __name__ == "__main__":
    experiment.main()
