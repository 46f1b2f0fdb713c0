"""Shapes of every architecture that `transformers` and we have, ordinary and odd, all small."""

from __future__ import annotations

from typing import Any

from models.shape.config import RopeScaling, TransformerConfig, YarnScaling

POSITIONS = 96
_BASE = {
    "vocab_size": 97,
    "layers": 3,
    "embed": 48,
    "heads": 6,
    "kv_heads": 2,
    "head_size": 8,
    "mlp": 80,
    "rope_base": 500.0,
    "norm_epsilon": 1e-5,
}
_LLAMA = {**_BASE, "qk_norm": False}
_NANOCHAT = {
    **_BASE,
    "mlp_kind": "relu2",
    "norm": "plain_rms",
    "embedding_norm": True,
    "tied": False,
    "logit_soft_cap": 15.0,
}
_GPT2 = {
    **_BASE,
    "kv_heads": 6,
    "mlp_kind": "gelu",
    "norm": "layer",
    "biases": True,
    "positions": "learned",
    "context": POSITIONS,
    "qk_norm": False,
    "rope_base": 10_000.0,
}
_THIRDS = RopeScaling(
    factor=4.0, low_frequency_factor=1.0, high_frequency_factor=6.0, original_context=120
)
_YARN = YarnScaling(factor=4.0, original_context=60, beta_fast=8.0)
_HOT = YarnScaling(factor=4.0, original_context=60, beta_fast=8.0, temperature=1.3)
_ODD = {"embed": 45, "heads": 5, "kv_heads": 1, "head_size": 6, "mlp": 33, "vocab_size": 101}

_SHAPES: dict[str, dict[str, Any]] = {
    "Llama tied": _LLAMA,
    "Llama llama3 rope, biases": {**_LLAMA, "rope_scaling": _THIRDS, "biases": True},
    "Llama odd, untied, yarn": {**_LLAMA, **_ODD, "tied": False, "rope_scaling": _YARN},
    "Mistral": {**_LLAMA, "window_pattern": "S", "window": 7, "tied": False},
    "Mistral one layer": {**_LLAMA, **_ODD, "window_pattern": "S", "window": 2, "layers": 1},
    "Qwen2": {**_LLAMA, "qkv_biases": True},
    "Qwen2 odd, windows": {
        **_LLAMA,
        **_ODD,
        "qkv_biases": True,
        "window_pattern": "LS",
        "window": 5,
    },
    "Qwen3": _BASE,
    "Qwen3 windows": {**_BASE, "window_pattern": "SSSL", "window": 5, "layers": 6},
    "Qwen3 odd, yarn": {
        **_BASE,
        **_ODD,
        "embed": 37,
        "heads": 6,
        "kv_heads": 3,
        "rope_scaling": _HOT,
        "tied": False,
    },
    "GPT2": _GPT2,
    "GPT2 odd, untied": {
        **_GPT2,
        "embed": 35,
        "heads": 5,
        "kv_heads": 5,
        "head_size": 7,
        "tied": False,
    },
    "NanoChat": _NANOCHAT,
    "NanoChat odd, no cap": {
        **_NANOCHAT,
        **_ODD,
        "logit_soft_cap": None,
        "tied": True,
        "rope_scaling": _THIRDS,
    },
}
SHAPES = {name: TransformerConfig(**fields) for name, fields in _SHAPES.items()}
