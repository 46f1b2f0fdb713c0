"""Whole models by name, as experiments import them: no JAX."""

from models.shape.presets import (
    bytes_tiny,
    llama_3_2_1b,
    llama_200m,
    nanochat_d16,
    tiny,
    tomat_1b,
    tomat_200m,
    tpuchat_130m,
)

__all__ = [
    "bytes_tiny",
    "llama_3_2_1b",
    "llama_200m",
    "nanochat_d16",
    "tiny",
    "tomat_1b",
    "tomat_200m",
    "tpuchat_130m",
]
