"""What follows from a model's shape for memory, time and FLOPs; imports no JAX.

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

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from models.shape.config import GATE_INPUTS, TransformerConfig
from models.shape.remat_names import BLOCK_INPUT
from pipeline.errors import InputError


@dataclass(frozen=True)
class Matrix:
    """A matrix of every block, with `rows` inputs and `columns` outputs.

    `result` names what it computes, see `models.shape.remat_names`; it is "" for the MLP's output,
    which no gradient needs. `into_block`: it reads the residual stream; others write to it.
    """

    result: str
    rows: int
    columns: int
    into_block: bool


@dataclass(frozen=True)
class Footprint:
    """A model's arrays and loops.

    Attributes:
        windows: the window of every layer, None for the whole sequence.
        widths: array elements per token and layer of each name of `models.shape.remat_names`,
            without attention's log-sum-exp.
        matrices: those of one block.
        block_parameters: in matrices of the blocks, without gates of value embeddings.
        table_parameters: in the embedding, an untied head and value embeddings.
        without_embeddings: all but those and learned positions (Kaplan et al., 2020,
            arXiv:2001.08361, section 2.1).
        period, cycles: layers of an iteration of the loop over layers, and its iterations.
    """

    windows: tuple[int | None, ...]
    widths: Mapping[str, int]
    matrices: tuple[Matrix, ...]
    parameters: int
    block_parameters: int
    table_parameters: int
    without_embeddings: int
    period: int
    cycles: int

    def pairs(self, length: int) -> int:
        """Pairs of a token and a position it attends to, over all layers."""
        return sum(attended_pairs(length, window) for window in self.windows)


@functools.lru_cache(256)
def footprint(model: TransformerConfig) -> Footprint:
    queries, keys = model.heads * model.head_size, model.kv_heads * model.head_size
    inputs = {"queries": queries, "keys": keys, "values": keys}
    inputs |= {"gate": model.mlp if model.mlp_kind == "swiglu" else 0, "up": model.mlp}
    streams = ("attention_input", "attention_output", "mlp_input")
    matrices = [Matrix(name, model.embed, size, True) for name, size in inputs.items() if size]
    matrices.append(Matrix("mlp_input", queries, model.embed, False))
    matrices.append(Matrix("", model.mlp, model.embed, False))
    period, cycles = cycles_of(model.kinds)
    table, (values, gates) = model.padded_vocab_size * model.embed, model.value_parameters
    tables = table * (1 if model.tied else 2) + values
    return Footprint(
        windows=model.windows,
        widths={
            BLOCK_INPUT: model.embed,
            **inputs,
            "attention_residuals": queries,
            **dict.fromkeys(streams, model.embed),
        },
        matrices=tuple(matrices),
        parameters=model.parameter_count,
        block_parameters=model.matmul_parameters - table - gates,
        table_parameters=tables,
        without_embeddings=model.parameter_count - tables - (model.context or 0) * model.embed,
        period=period,
        cycles=cycles,
    )


def attended_pairs(length: int, window: int | None = None) -> int:
    """Pairs of a token and a position it attends to: sum of min(t + 1, window)."""
    # A triangle until the window is full, then `reach` positions for every later token.
    reach = length if window is None else min(length, window)
    return reach * (reach + 1) // 2 + (length - reach) * reach


def cycles_of(kinds: Sequence[Any]) -> tuple[int, int]:
    """The layers per cycle and the number of cycles that `kinds` start with.

    Minimizes the blocks in the program: those of one cycle plus the layers after the last cycle.
    """
    count = len(kinds)
    if len(set(kinds)) == 1:  # at once, as any number of layers may be asked for
        return 1, count

    def repeats(period: int) -> int:
        layers = next((i for i in range(count) if kinds[i] != kinds[i % period]), count)
        return layers // period

    choices = ((period, repeats(period)) for period in range(1, count + 1))
    return min(choices, key=lambda choice: (choice[0] + count - choice[0] * choice[1], choice[0]))


def parameter_axes(model: TransformerConfig) -> tuple[Mapping[str, int], ...]:
    """Sizes of the named axes of the model's parameters, one entry per shape."""
    embed, heads = {"embed": model.embed}, {"head_size": model.head_size}
    keys = {"kv_heads": model.kv_heads, **heads}
    queries = {"q_per_kv": model.q_per_kv, **keys}
    mlp = {"mlp": model.mlp}
    of_block = [embed, {**embed, **queries}, {**embed, **keys}, {**embed, **mlp}]
    of_block += [heads] if model.qk_norm else []
    of_block += [queries, keys] if model.biases or model.qkv_biases else []
    of_block += [mlp] if model.biases else []
    of_block += [{}] if model.residual_scale or model.input_scale else []
    vocab, tables = {"vocab": model.padded_vocab_size}, {"layers": sum(model.value_layers)}
    gate = {"gate_inputs": min(GATE_INPUTS, model.embed), "kv_heads": model.kv_heads}
    found = [{**vocab, **embed}]
    found += [{**vocab, **keys, **tables}, {**gate, **tables}] if any(model.value_layers) else []
    found += [{"position": model.context, **embed}] if model.context is not None else []
    return (*found, embed, *({"layers": model.layers, **axes} for axes in of_block))


def training_flops_per_token(
    config: TransformerConfig, sequence_length: int, causal: bool
) -> float:
    """Mean FLOPs of one token's forward and backward pass, three times the forward pass."""

    def attended(window: int | None) -> float:
        if causal:
            return attended_pairs(sequence_length, window) / sequence_length
        return sequence_length if window is None else min(sequence_length, window)

    positions = math.fsum(attended(window) for window in config.windows)
    attention = 4 * config.heads * config.head_size * positions
    return 3.0 * float(2 * config.matmul_parameters + attention)


LOGIT_BUDGET_BYTES = 512 * 2**20


def check_chunks(position: int, chunks: int) -> None:
    """Raise `InputError` unless `chunks` divides the positions of a sequence on one device."""
    if position % chunks:
        raise InputError(
            f"loss chunks: expected a divisor of the {position} positions of a sequence on one "
            f'device, found {chunks}; give another number, or "auto" as TrainConfig.loss_chunks'
        )


def chunk_count(
    batch: int, position: int, vocab: int, *, shards: int = 1, budget: int = LOGIT_BUDGET_BYTES
) -> int:
    """Chunks of positions whose float32 logits fit `budget` bytes on each of `shards` devices.

    The smallest sufficient divisor of `position`, or `position` where no divisor is sufficient.
    """
    needed = math.ceil(batch * position * vocab * 4 / shards / budget)
    small = [chunks for chunks in range(1, math.isqrt(position) + 1) if position % chunks == 0]
    divisors = {*small, *(position // chunks for chunks in small)}
    return min((chunks for chunks in divisors if chunks >= needed), default=position)
