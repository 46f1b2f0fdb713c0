"""Floating-point operations (FLOPs) of training, for MFU.

A token costs 2 FLOPs per parameter that multiplies it and 4 per attended position, head and feature
(the matmuls of queries with keys and of weights with values); a backward pass costs twice the
forward pass. Recomputation and the embedding's gather are not counted; the output head is.

Two conventions are in use and both are reported. `causal=True` counts the positions a token attends
to: min(t + 1, window) for token t of a sequence, (length + 1) / 2 on average without a window.
`causal=False` counts the full square, min(length, window) for every token (PaLM, Chowdhery et al.,
2022, appendix B, and Megatron-LM), which inflates MFU for long sequences. Both count a sequence as
one document, also where attention stays inside documents.
"""

from __future__ import annotations

import math

from models.shape.config import TransformerConfig
from models.shape.footprint import attended_pairs


def forward_flops_per_token(config: TransformerConfig, sequence_length: int, causal: bool) -> float:
    """Mean FLOPs of one token's forward pass in a sequence of `sequence_length` tokens."""

    def attended(window: int | None) -> float:
        if causal:
            return attended_pairs(sequence_length, window) / sequence_length
        return sequence_length if window is None else min(sequence_length, window)

    positions = math.fsum(attended(window) for window in config.windows)
    attention = 4 * config.heads * config.head_size * positions
    return float(2 * config.matmul_parameters + attention)


def training_flops_per_token(
    config: TransformerConfig, sequence_length: int, causal: bool
) -> float:
    """Mean FLOPs of one token's forward and backward pass, three times the forward pass."""
    return 3.0 * forward_flops_per_token(config, sequence_length, causal)
