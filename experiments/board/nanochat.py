"""nanochat's net and optimizer (its code of 2026-07), without smear and backout."""

from experiments.board import Entry
from training.config import Group, OptimizerConfig

MODEL = {
    "mlp_kind": "relu2",
    "norm": "plain_rms",
    "embedding_norm": True,
    "logit_soft_cap": 15.0,
    "query_key_scale": 1.2,
    "residual_scale": (1.15, 1.05),
    "input_scale": (0.20, 0.05),
    "value_embeddings": "alternate",
    "zero_outputs": True,
    "mlp_init_scale": 0.4,
    "embedding_std": 0.8,
    "head_std": 0.001,
    "rope_base": 100_000.0,
}
ENTRY = Entry(
    model=MODEL,
    optimizer=OptimizerConfig(
        kind="muon",
        learning_rate=0.04,
        schedule="wsd",
        warmup=0.02,
        decay=0.65,
        min_ratio=0.05,
        beta1=0.8,
        beta2=0.95,
        epsilon=1e-10,
        weight_decay=0.28,
        weight_decay_schedule="cosine",
        cautious_decay=True,
        muon_rms=None,
        muon_momentum=0.97,
        muon_momentum_start=0.85,
        muon_momentum_warmup=100,
        muon_momentum_end=0.90,
        muon_iteration="polar_express",
        muon_row_beta=0.9,
        embedding=Group(learning_rate=0.6, beta2=0.995, weight_decay=0.001),
        value_embedding=Group(learning_rate=0.3, beta2=0.995, weight_decay=0.01),
        head=Group(learning_rate=0.016, beta2=0.96, weight_decay=0.01),
        residual_scale=Group(learning_rate=0.01, weight_decay=0.05),
        input_scale=Group(learning_rate=1.0, beta1=0.96, weight_decay=0.0),
    ),
)
