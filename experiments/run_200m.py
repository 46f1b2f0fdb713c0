"""Llama 200M on 4 billion tokens of FineWeb-edu, on one v6e-16 slice.

ponente plan experiments/run_200m.py              shows what would run, on any machine
ponente run experiments/run_200m.py --published   with AdamW at GPT-3's rate instead of Muon
ponente run experiments/run_200m.py --dial        nanochat's net and batch for as many parameters
ponente run experiments/run_200m.py --smoke       the same graph on a laptop's CPU, in minutes
"""

import steps
from data.source import fineweb_edu, python_documentation
from models.config import TransformerConfig
from models.presets import llama_200m, tiny
from pipeline import Experiment, pod
from training.config import OptimizerConfig, TrainConfig
from training.recipes import llama, marin_qwen3

DIAL = steps.recipe(parameters=200e6, hardware="v6e-16", length=4096)


def run_200m(
    source: str = fineweb_edu("sample-10BT"),
    train_tokens: int = 4_000_000_000,  # 20 per parameter, compute-optimal: Hoffmann et al., 2022
    validation_tokens: int = 10_000_000,  # for a standard error of the loss of about 0.001 nats
    tokenizer_tokens: int | None = 200_000_000,  # about 1 GB of text, which fits a host's memory
    model: TransformerConfig = llama_200m,
    # Muon with the rates that Marin tuned for this batch, of its models of 300M and 520M.
    optimizer: OptimizerConfig = marin_qwen3("300m").optimizer,
    training: TrainConfig = TrainConfig(batch_size=128),  # 524,288 tokens per step: GPT-3 small
    length: int = 4096,
    prompts: tuple[str, ...] = ("The three laws of thermodynamics", "Photosynthesis is"),
    seed: int = 0,
    hardware: str = "v6e-16",
) -> steps.Report:
    """The report of a model; tokenizer and model learn from the training split only."""
    splits, on = (("validation", validation_tokens),), pod(hardware)
    documents = steps.sample(source, tokens=train_tokens, splits=splits, seed=seed)
    tokenizer = steps.train_tokenizer(
        documents, vocab_size=model.vocab_size, tokens=tokenizer_tokens
    )
    tokens = steps.tokenize(documents, tokenizer)
    sequences = steps.block_shuffle(tokens, length, seed=seed)
    # Samples during training are part of the model's key: other sample prompts train a new model.
    trained = steps.train(
        sequences, model, optimizer, training, epochs=1, sample_prompts=("The",), hardware=on
    )
    scores = steps.evaluate(trained, hardware=on)
    text = steps.generate(trained, prompts=prompts, seed=seed, hardware=on)
    return steps.report(trained, scores, text)


experiment = Experiment(
    run_200m,
    published={"optimizer": llama("200m").optimizer},
    dial={
        "train_tokens": DIAL.tokens,
        "model": DIAL.model,
        "optimizer": DIAL.optimizer,
        "training": DIAL.train,
    },
    smoke={
        "source": python_documentation(),  # 2 MB of English text that ships with CPython
        "train_tokens": -1,  # everything but the validation split
        "validation_tokens": 20_000,
        "tokenizer_tokens": None,
        "model": tiny,
        "optimizer": OptimizerConfig(learning_rate=3e-3, schedule="wsd", warmup=0.05),
        "training": TrainConfig(
            batch_size=8, compute_dtype="float32", evaluate_every=100, checkpoint_every=50
        ),
        "length": 128,
        "prompts": ("Return the", "This module"),
        "hardware": "local",
    },
)

if __name__ == "__main__":
    experiment.main()
