"""Floating-point operations (FLOPs) of training and parameter counts, for MFU.

A token costs 2 FLOPs per parameter that multiplies it and 4 per attended position, head and feature
(the matmuls of queries with keys and of weights with values); a backward pass costs twice the
forward pass. Recomputation and the embedding's gather are not counted; the output head is.

Two conventions are in use and both are reported. `causal=True` counts the positions a token attends
to: min(t + 1, window) for token t of its document, (length + 1) / 2 on average without a window.
`causal=False` counts the full square, min(length, window) for every token, regardless of documents
(PaLM, Chowdhery et al., 2022, appendix B, and Megatron-LM), which inflates MFU for long sequences.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from models.config import TransformerConfig
from pipeline.errors import InputError

if TYPE_CHECKING:
    import numpy


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
    """Pairs of a token and a position it attends to: sum of min(t + 1, window) over a document."""
    # A triangle until the window is full, then `reach` positions for every later token.
    reach = length if window is None else min(length, window)
    return reach * (reach + 1) // 2 + (length - reach) * reach


def mean_attended(documents: Sequence[int], window: int | None = None) -> float:
    """Mean number of positions a token attends to, where attention stays inside documents.

    Args:
        documents: lengths in tokens after packing into sequences, padding included.
        window: maximum positions a token attends to, its own included; None for all.

    Raises:
        InputError: there are no documents, or one has no tokens.
    """
    if not documents or min(documents) < 1:
        raise InputError(
            "documents: expected lengths of at least 1 token, found "
            f"{min(documents, default='none')}; leave empty documents out"
        )
    return sum(attended_pairs(length, window) for length in documents) / sum(documents)


def document_lengths(segment_ids: numpy.ndarray) -> list[int]:
    """Lengths of the documents of packed sequences, in order; the end of a sequence ends one.

    Args:
        segment_ids: integers [batch, position], equal within a document and different between
            documents of a sequence.

    Raises:
        InputError: an id occurs in two places of a sequence; attention would treat them as one
            document.
    """
    lengths = []
    for i, row in enumerate(segment_ids.tolist()):
        starts = [t for t in range(len(row)) if t == 0 or row[t] != row[t - 1]]
        if len(starts) != len(set(row)):
            raise InputError(
                "segment_ids: expected each id in consecutive positions, found one of sequence "
                f"{i} in two places; give each document of a sequence its own id"
            )
        ends = [*starts[1:], len(row)]
        lengths += [end - start for start, end in zip(starts, ends, strict=True)]
    return lengths


def forward_flops_per_token(
    config: TransformerConfig,
    sequence_length: int,
    causal: bool,
    documents: Sequence[int] | None = None,
) -> float:
    """Mean FLOPs of one token's forward pass in a sequence of `sequence_length` tokens.

    Args:
        config: the model; its windows bound the positions that a layer's tokens attend to.
        sequence_length: tokens per sequence.
        causal: the convention, see above.
        documents: lengths of packed documents, where attention stays inside documents; None where
            it crosses them. `causal=False` ignores them.
    """

    def attended(window: int | None) -> float:
        if causal:
            return mean_attended([sequence_length] if documents is None else documents, window)
        return sequence_length if window is None else min(sequence_length, window)

    means = {window: attended(window) for window in set(config.windows)}
    positions = math.fsum(means[window] for window in config.windows)
    attention = 4 * config.heads * config.head_size * positions
    return float(2 * config.matmul_parameters + attention)


def training_flops_per_token(
    config: TransformerConfig,
    sequence_length: int,
    causal: bool,
    documents: Sequence[int] | None = None,
) -> float:
    """Mean FLOPs of one token's forward and backward pass, three times the forward pass."""
    return 3.0 * forward_flops_per_token(config, sequence_length, causal, documents)


def ideal_tokens_per_second(
    config: TransformerConfig, sequence_length: int, causal: bool, peak: float
) -> float:
    """Tokens per second that a device of `peak` FLOPs per second trains on at an MFU of 1."""
    return peak / training_flops_per_token(config, sequence_length, causal)
