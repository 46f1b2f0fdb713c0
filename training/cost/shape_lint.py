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
    found, width = [], model.heads * model.head_size
    if model.head_size < MATRIX_UNIT:
        better = [size for size in (256, 128) if size > model.head_size and width % size == 0]
        advice = [f"; {width // size} heads of {size} have as many weights" for size in better]
        found.append(
            f"head size {model.head_size} fills {model.head_size / MATRIX_UNIT:.0%} of the matrix "
            f"unit in attention's matmuls, in all {model.layers} layers, and time goes with the "
            f"number of heads{''.join(advice[:1])}"
        )
    sizes = {"embed": model.embed, "mlp": model.mlp, "vocab": model.padded_vocab_size}
    for name, size in sizes.items():
        if size % MATRIX_UNIT:
            advice = f"; set TransformerConfig.vocab_multiple to {MATRIX_UNIT}"
            found.append(
                f"{name} {size} is not a multiple of {MATRIX_UNIT}: the last tile of each matmul "
                f"with it is partly empty{advice if name == 'vocab' else ''}"
            )
    positions, tensor = sequence_length // parallel.sequence, parallel.tensor
    if positions % LANES:
        found.append(
            f"{positions} positions of a row on one device are not a multiple of {LANES}: every "
            "activation is padded, and the splash kernel cannot run"
        )
    # Contracted axes that `tensor` cuts. Sharded state is gathered before the matmul.
    cut = {"attention output (query features)": width, "MLP down (mlp)": model.mlp}
    for name, size in cut.items():
        if tensor > 1 and size // tensor < MATRIX_UNIT:
            found.append(
                f"{name}: {size} over tensor {tensor} contracts over {size // tensor} numbers on a "
                f"device, fewer than the {MATRIX_UNIT} of the matrix unit"
            )
    return found
