"""tomat's 1B model: the graph of `tomat_200m` on a v6e-32 slice.

ponente plan experiments/tomat_1b.py             sizes, memory, time and cost
ponente run experiments/tomat_1b.py --lmq        rows of 4,608: one token per density (LMQ, P=15)
ponente run experiments/tomat_1b.py --smoke      the same graph on a laptop's CPU
"""

import steps
from experiments import tomat_200m
from models.config import TransformerConfig
from models.shape import presets
from pipeline import Experiment
from training.config import OptimizerConfig, TrainConfig


def tomat(
    source: str = tomat_200m.SOURCE,
    vocab_size: int = 18_570,  # for one-token codes; 6,792 for two-token codes
    length: int = 8192,
    mask_column: str | None = None,
    padding: int | None = None,
    validation_rows: int = 4_096,
    model: TransformerConfig = presets.tomat_1b,
    optimizer: OptimizerConfig = OptimizerConfig(warmup=0.05, weight_decay=0.0),
    training: TrainConfig = TrainConfig(
        steps=16_000,
        batch_size=256,
        microbatches=4,  # avoids recomputation: predicted MFU 39 %, or 35 % without microbatches
    ),
    longer: int = 0,
    hardware: str = "v6e-32",
) -> steps.Report:
    """The report, as `tomat_200m.tomat` with other defaults."""
    return tomat_200m.tomat(**locals())


experiment = Experiment(tomat, lmq={"length": 4_608}, smoke=tomat_200m.SMOKE)

if __name__ == "__main__":
    experiment.main()
