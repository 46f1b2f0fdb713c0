"""nanochat of depth 16 with sequences of 16,384 tokens, on a spot v6e-4: one host, four chips.

ponente plan experiments/nanochat_16k.py              sizes, memory and time
ponente run experiments/nanochat_16k.py --published   the net and optimizer of nanochat-jax
ponente run experiments/nanochat_16k.py --v5e         its sequences of 1,024 on a v5e-8
ponente run experiments/nanochat_16k.py --smoke       the same graph on a laptop's CPU
"""

from dataclasses import replace

import steps
from data.source import fineweb_edu, python_documentation
from models.config import TransformerConfig
from models.presets import nanochat_d16
from pipeline import Experiment, pod
from training.config import OptimizerConfig, TrainConfig
from training.recipes import nanochat

BATCH = 524_288  # tokens per step, as nanochat
RECIPE = nanochat(16, vocab_size=65_536, length=16_384, steps=50_000)
PUBLISHED = OptimizerConfig(
    kind="muon",
    learning_rate=3e-4,
    muon_learning_rate=2e-2,
    muon_rms=None,
    schedule="wsd",
    decay=0.4,
    weight_decay=0.0,
)


def nanochat_16k(
    source: str = fineweb_edu("sample-100BT"),
    train_tokens: int = 26_214_400_000,  # 50,000 steps
    validation_tokens: int = 10_000_000,
    tokenizer_tokens: int = 200_000_000,
    model: TransformerConfig = RECIPE.model,  # "SSSL": three of four layers have a window of 4,096
    optimizer: OptimizerConfig = RECIPE.optimizer,
    training: TrainConfig = TrainConfig(
        batch_size=BATCH // 16_384,
        microbatches=2,  # avoids recomputation: predicted MFU 29 %, or 28 % without microbatches
        separate_documents=True,  # no document attends to another one of its sequence
        checkpoint_every=250,  # a spot host has 30 s notice; unsaved steps are repeated
    ),
    length: int = 16_384,
    prompts: tuple[str, ...] = ("def fibonacci(n):\n",),
    hardware: str = "v6e-4",
) -> steps.Report:
    """The report of a model on packed sequences; a longer document continues in the next one."""
    splits, on = (("validation", validation_tokens),), pod(hardware)
    documents = steps.sample(source, tokens=train_tokens, splits=splits)
    tokenizer = steps.train_tokenizer(
        documents,
        vocab_size=model.vocab_size,
        tokens=tokenizer_tokens,
        pre_tokenizer="nanochat",
    )
    tokens = steps.pack(steps.tokenize(documents, tokenizer), sequence_length=length)
    sequences = steps.block_shuffle(tokens, length)
    trained = steps.train(sequences, model, optimizer, training, epochs=1, hardware=on)
    text = steps.generate(trained, prompts=prompts, hardware=on)
    return steps.report(trained, steps.evaluate(trained, hardware=on), text)


experiment = Experiment(
    nanochat_16k,
    published={"model": nanochat_d16, "optimizer": PUBLISHED},  # windows of 8,192
    v5e={
        "optimizer": PUBLISHED,
        "length": 1_024,
        "model": replace(nanochat_d16, window_pattern="L", window=None),
        "training": TrainConfig(batch_size=BATCH // 1_024, checkpoint_every=250),
        "hardware": "v5e-8",
    },
    smoke={
        "optimizer": PUBLISHED,
        "source": python_documentation(),
        "train_tokens": 40_000,
        "validation_tokens": 8_000,
        "tokenizer_tokens": 40_000,
        "model": replace(
            nanochat_d16,
            **{"vocab_size": 512, "layers": 4, "embed": 32, "heads": 4, "kv_heads": 4},
            **{"head_size": 8, "mlp": 64, "window": 128},
        ),
        "training": TrainConfig(
            batch_size=4, separate_documents=True, compute_dtype="float32", steps=8
        ),
        "length": 256,
        "hardware": "local",
    },
)

if __name__ == "__main__":
    experiment.main()
