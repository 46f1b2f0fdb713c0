"""tomat's 200M model of materials: rows of integers that are not text, on a v6e-16 slice.

ponente plan experiments/tomat_200m.py             sizes, memory, time and cost
ponente run experiments/tomat_200m.py --smoke      the same graph on a laptop's CPU
"""

from dataclasses import replace
from pathlib import Path

import steps
from models.config import TransformerConfig
from models.presets import tomat_200m
from pipeline import Experiment, pod
from training.config import OptimizerConfig, TrainConfig

SOURCE = "./tokens/*.parquet"  # a list of ids per row; or gs://bucket/tokens/*.parquet
TOY = str(Path(__file__).parent / "data" / "lattices.parquet")  # 512 rows of a smooth random field


def tomat(
    source: str = SOURCE,
    vocab_size: int = 6_792,
    length: int = 8192,
    mask_column: str | None = None,  # 0 where an id is input only and not predicted
    padding: int | None = None,  # the id that pads rows; it is not predicted
    validation_rows: int = 4_096,
    model: TransformerConfig = tomat_200m,
    optimizer: OptimizerConfig = OptimizerConfig(warmup=0.05, weight_decay=0.0),
    training: TrainConfig = TrainConfig(steps=8_000, batch_size=128),
    longer: int = 0,  # total steps to extend the run to; 0 for no extension
    seed: int = 0,
    hardware: str = "v6e-16",
) -> steps.Report:
    """The report of a model of integer rows.

    Rows are shuffled in blocks of 64 and windows of 1,024 blocks, so that every batch has many
    materials.
    """
    model, on = replace(model, vocab_size=vocab_size, vocab_multiple=256), pod(hardware)
    tokens = steps.integer_rows(
        source,
        **{"vocab_size": vocab_size, "sequence_length": length, "mask_column": mask_column},
        **{"padding": padding, "splits": (("validation", validation_rows),), "seed": seed},
    )
    sequences = steps.block_shuffle(tokens, length, io_block_size=64, window_blocks=1024, seed=seed)
    trained = steps.train(sequences, model, optimizer, training, hardware=on)
    if longer:
        more = replace(training, steps=longer)
        trained = steps.extend(trained, sequences, optimizer=optimizer, train=more, hardware=on)
    return steps.report(trained, steps.evaluate(trained, hardware=on))


SMOKE = {
    "source": TOY,
    "vocab_size": 64,
    "length": 128,
    "mask_column": "loss_mask",
    "validation_rows": 64,
    "model": replace(tomat_200m, layers=2, embed=32, heads=4, kv_heads=4, head_size=8, mlp=64),
    "training": TrainConfig(steps=8, batch_size=8, compute_dtype="float32"),
    "longer": 12,
    "hardware": "local",
}
experiment = Experiment(tomat, smoke=SMOKE)

if __name__ == "__main__":
    experiment.main()
