"""What follows from a model's shape for memory, time and FLOPs, computed once; imports no JAX."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from models.shape.config import TransformerConfig
from models.shape.flops import attended_pairs
from models.shape.layer_cycles import cycles_of
from models.shape.remat_names import BLOCK_INPUT


@dataclass(frozen=True)
class Matrix:
    """A matrix of every block.

    Attributes:
        result: name of what it computes, see `models.remat_names`; "" for the MLP's output, which
            no gradient needs.
        rows, columns: its inputs and outputs.
        into_block: whether it reads the residual stream; others write to it.
    """

    result: str
    rows: int
    columns: int
    into_block: bool


@dataclass(frozen=True)
class Footprint:
    """A model's arrays.

    Attributes:
        windows: the window of every layer, None for the whole sequence.
        widths: array elements per token and layer of each name of `models.remat_names`, without
            attention's log-sum-exp.
        matrices: those of one block.
        parameters: number of all parameters.
        block_parameters: of these in matrices of the blocks.
        table_parameters: of these in the embedding and an untied head.
        period, cycles: layers of an iteration of the loop over layers, and its iterations.
    """

    windows: tuple[int | None, ...]
    widths: Mapping[str, int]
    matrices: tuple[Matrix, ...]
    parameters: int
    block_parameters: int
    table_parameters: int
    period: int
    cycles: int

    def pairs(self, length: int) -> int:
        """Pairs of a token and a position it attends to, over all layers."""
        return sum(attended_pairs(length, window) for window in self.windows)


@functools.lru_cache(256)
def footprint(model: TransformerConfig) -> Footprint:
    """The footprint of a model."""
    queries, keys = model.heads * model.head_size, model.kv_heads * model.head_size
    inputs = {"queries": queries, "keys": keys, "values": keys}
    inputs |= {"gate": model.mlp if model.mlp_kind == "swiglu" else 0, "up": model.mlp}
    streams = ("attention_input", "attention_output", "mlp_input")
    matrices = [Matrix(name, model.embed, size, True) for name, size in inputs.items() if size]
    matrices.append(Matrix("mlp_input", queries, model.embed, False))
    matrices.append(Matrix("", model.mlp, model.embed, False))
    period, cycles = cycles_of(model.windows)
    table = model.padded_vocab_size * model.embed
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
        block_parameters=model.matmul_parameters - table,
        table_parameters=table * (1 if model.tied else 2),
        period=period,
        cycles=cycles,
    )
