"""Warns before a run about sizes of a model that waste a TPU.

A v6e matrix unit multiplies 256 x 256 tiles; its memory tiles are 8 or 16 rows by 128 lanes. The
rules cover shapes that the compiler cannot improve.
"""

from __future__ import annotations

from models.shape.config import TransformerConfig
from training.config import Parallelism

MATRIX_UNIT = 256
LANES = 128


def lint(
    model: TransformerConfig,
    parallel: Parallelism,
    *,
    platform: str,
    sequence_length: int,
) -> list[str]:
    """One warning for every size that wastes the matrix unit or memory; none except on TPUs."""
    if platform != "tpu":
        return []
    return [
        *_heads(model),
        *_tiles(model, sequence_length // parallel.sequence),
        *_contractions(model, parallel.tensor),
    ]


def _heads(model: TransformerConfig) -> list[str]:
    if model.head_size >= MATRIX_UNIT:
        return []
    fill = min(model.head_size / MATRIX_UNIT, 1.0)
    width = model.heads * model.head_size
    better = [size for size in (256, 128) if size > model.head_size and width % size == 0]
    advice = f"; {width // better[0]} heads of {better[0]} have as many weights" if better else ""
    return [
        f"head size {model.head_size} fills {fill:.0%} of the matrix unit in attention's matmuls, "
        f"in all {model.layers} layers, and time goes with the number of heads{advice}"
    ]


def _tiles(model: TransformerConfig, positions: int) -> list[str]:
    sizes = {"embed": model.embed, "mlp": model.mlp, "vocab": model.padded_vocab_size}
    advice = {"vocab": f"; set TransformerConfig.vocab_multiple to {MATRIX_UNIT}"}
    found = [
        f"{name} {size} is not a multiple of {MATRIX_UNIT}: the last tile of each matmul with it "
        f"is partly empty{advice.get(name, '')}"
        for name, size in sizes.items()
        if size % MATRIX_UNIT
    ]
    if positions % LANES:
        found.append(
            f"{positions} positions of a row on one device are not a multiple of {LANES}: every "
            "activation is padded, and the splash kernel cannot run"
        )
    return found


def _contractions(model: TransformerConfig, tensor: int) -> list[str]:
    """Warnings about contracted axes that `tensor` cuts below the matrix unit.

    Sharded state does not count: it is gathered before the matmul.
    """
    if tensor == 1:
        return []
    cut = {
        "attention output (query features)": model.heads * model.head_size,
        "MLP down (mlp)": model.mlp,
    }
    return [
        f"{name}: {size} over tensor {tensor} contracts over {size // tensor} numbers on a device, "
        f"fewer than the {MATRIX_UNIT} of the matrix unit"
        for name, size in cut.items()
        if size // tensor < MATRIX_UNIT
    ]
