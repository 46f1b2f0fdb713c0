"""Floating-point operations of training, and what a device could do: the two sides of MFU.

A token costs 2 operations per weight that multiplies it and 4 per attended position, head and
feature (scores and their product with the values); a backward pass costs twice the forward pass.
Recomputation is never counted, nor is the embedding's gather; the output head is.

Two conventions are in use and both are shown. `causal=True` counts the positions a token attends
to, (sequence + 1) / 2 on average; `causal=False` counts the full square (PaLM, Chowdhery et al.,
2022, appendix B, and Megatron-LM), which flatters long sequences.
"""

from __future__ import annotations

from models.config import TransformerConfig

PEAK_FLOPS = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
}
"""Dense bfloat16 operations per second and chip, by JAX's `device_kind` (cloud.google.com/tpu)."""


def forward_flops_per_token(config: TransformerConfig, sequence_length: int, causal: bool) -> float:
    """Mean operations of one token's forward pass in a row of `sequence_length` tokens."""
    attended = (sequence_length + 1) / 2 if causal else sequence_length
    attention = 4 * config.layers * config.heads * config.head_size * attended
    return float(2 * config.matmul_parameters + attention)


def training_flops_per_token(
    config: TransformerConfig, sequence_length: int, causal: bool
) -> float:
    """Mean operations of one token's forward and backward pass, three times the forward pass."""
    return 3.0 * forward_flops_per_token(config, sequence_length, causal)


def peak_flops(device_kind: str) -> float | None:
    """Peak of one chip in operations per second, None for a device not in the table."""
    return PEAK_FLOPS.get(device_kind)
