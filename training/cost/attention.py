"""What attention's kernels cost: which one runs, its temporary memory, its scheduled cycles."""

from __future__ import annotations

import math

from models.attention.backend_choice import BackendChoice, choose_backend
from models.shape import splash_tiles, tpu_tiles
from models.shape.config import TransformerConfig
from models.shape.splash_tiles import LANES, choose_tiles, choose_way, partial_sums_bytes
from training.config.parallelism import Parallelism
from training.config.train import TrainConfig


def attention_backend(
    model: TransformerConfig, train: TrainConfig, platform: str, chip: str = ""
) -> BackendChoice:
    """The attention back end of a configuration, see `choose_backend`."""
    return choose_backend(
        train.attention,
        platform,
        position=train.sequence_length,
        head_size=model.head_size,
        soft_cap=model.attention_soft_cap,
        segments=train.separate_documents,
        window=model.window,
        dtype=train.compute_dtype,
        sequence_shards=train.parallel.sequence,
        normalized=model.small_scores,
        chip=chip,
    )


def exchanges_heads(model: TransformerConfig, parallel: Parallelism) -> bool:
    """Whether devices that share a sequence exchange its positions for heads."""
    return choose_way(model.kv_heads // parallel.tensor, True, None, parallel.sequence) == "heads"


def partial_sums(
    model: TransformerConfig,
    train: TrainConfig,
    devices: int,
    window: int | None,
    platform: str = "tpu",
    chip: str = "",
) -> float:
    """Bytes that splash's fused backward kernel writes in one layer; 0 where it does not run."""
    sequence, length = train.parallel.sequence, train.sequence_length
    backend = train.attention
    if backend == "auto" and platform == "tpu":
        backend = attention_backend(model, train, platform, chip).backend
    if platform != "tpu" or backend != "splash" or length % (LANES * sequence):
        return 0.0
    data, group, _, tensor = train.parallel.mesh_shape(devices)
    rows = train.batch_size / (data * group * train.microbatches)
    heads = math.ceil(rows * model.heads / tensor)
    if exchanges_heads(model, train.parallel):
        heads, sequence = math.ceil(heads / sequence), 1
    sizes = choose_tiles(length, model.head_size, window, sequence, heads)
    if not sizes.use_fused_bwd_kernel:
        return 0.0
    return heads * partial_sums_bytes(length, model.head_size, sequence, sizes.block_kv_dkv)


def cycles_over_splash(model: TransformerConfig, length: int) -> float:
    """Scheduled cycles of our kernel over splash's, all layers' rows, forward and backward.

    This ratio is the compiler's: it has not been measured on a chip.
    """
    shift = tpu_tiles.needs_shift(model.small_scores, model.attention_soft_cap)
    ours = theirs = 0.0
    for window in model.windows:
        window = None if window is None or window >= length else window
        row = tpu_tiles.Row(length, length, model.head_size, window, shift)
        ours += sum(
            tpu_tiles.row_cycles(row, tpu_tiles.choose_sight(row), model.heads // model.kv_heads)
        )
        theirs += splash_tiles.row_cycles(length, model.head_size, window)
    return ours / theirs
