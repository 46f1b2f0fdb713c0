"""Floating-point operations (FLOPs) of training and parameter counts, for MFU.

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

import dataclasses
import math

from models.shape.config import TransformerConfig


@dataclasses.dataclass(frozen=True)
class Parameters:
    """Parameter counts under three conventions.

    Attributes:
        total: all parameters.
        matmul: parameters in matmuls with every token: the blocks' matrices and the output head,
            tied or not. Norms, biases and the gathered embedding are excluded.
        without_embeddings: all parameters except the embedding, an untied head and learned
            positions (Kaplan et al., 2020, arXiv:2001.08361, section 2.1).
    """

    total: int
    matmul: int
    without_embeddings: int


def parameters(config: TransformerConfig) -> Parameters:
    """The exact parameter counts of a model, from its shape alone."""
    tables = config.padded_vocab_size * (1 if config.tied else 2) + (config.context or 0)
    total = config.parameter_count
    return Parameters(total, config.matmul_parameters, total - tables * config.embed)


def attended_pairs(length: int, window: int | None = None) -> int:
    """Pairs of a token and a position it attends to: sum of min(t + 1, window)."""
    # A triangle until the window is full, then `reach` positions for every later token.
    reach = length if window is None else min(length, window)
    return reach * (reach + 1) // 2 + (length - reach) * reach


def forward_flops_per_token(
    config: TransformerConfig,
    sequence_length: int,
    causal: bool,
) -> float:
    """Mean FLOPs of one token's forward pass in a sequence of `sequence_length` tokens.

    Args:
        config: the model; its windows bound the positions that a layer's tokens attend to.
        sequence_length: tokens per sequence.
        causal: the convention, see above.
    """

    def attended(window: int | None) -> float:
        if causal:
            return attended_pairs(sequence_length, window) / sequence_length
        return sequence_length if window is None else min(sequence_length, window)

    positions = math.fsum(attended(window) for window in config.windows)
    attention = 4 * config.heads * config.head_size * positions
    return float(2 * config.matmul_parameters + attention)


def training_flops_per_token(
    config: TransformerConfig,
    sequence_length: int,
    causal: bool,
) -> float:
    """Mean FLOPs of one token's forward and backward pass, three times the forward pass."""
    return 3.0 * forward_flops_per_token(config, sequence_length, causal)
