"""AdamW with one rate for all parameters, a cosine to a tenth: `llama` of the presets."""

from experiments.board import Entry
from training.config import OptimizerConfig

ENTRY = Entry(
    optimizer=OptimizerConfig(learning_rate=5e-3, schedule="cosine", warmup=0.05),
    public_steps=5_625,  # row 2
)
