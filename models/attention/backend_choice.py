"""The choice of an attention back end, and what each can run; imports no JAX, for plans too."""

from __future__ import annotations

from typing import NamedTuple

from models.shape.splash_tiles import LANES, only_narrow_tiles
from pipeline.errors import InputError

BACKENDS = ("reference", "blockwise", "splash", "cudnn")
KERNEL_OF = {"tpu": "splash", "gpu": "cudnn"}
BLOCKWISE_FROM = 256
"""Sequence length from which `blockwise` is faster than `reference` on a CPU."""
DTYPES = ("bfloat16", "float16")
WIDEST_HEAD = 256


class BackendChoice(NamedTuple):
    """The chosen back end, one of `BACKENDS`, and the reason for the choice, to be logged."""

    backend: str
    reason: str


def choose_backend(
    requested: str,
    platform: str,
    *,
    position: int,
    head_size: int,
    soft_cap: float | None = None,
    segments: bool = False,
    window: int | None = None,
    dtype: str = "bfloat16",
    sequence_shards: int = 1,
) -> BackendChoice:
    """The attention back end for these shapes and devices, and the reason for it.

    Args:
        requested: "auto" or one of `BACKENDS`.
        platform: platform of the devices that will run the program: "tpu", "cpu" or "gpu" (NVIDIA).
        position: tokens per sequence.
        head_size: width of one head.
        soft_cap: soft cap of the scores, or None.
        segments: whether attention stops at document boundaries.
        window: positions each position attends to, itself included; None for all.
        dtype: dtype of queries, keys and values.
        sequence_shards: devices that share the positions of one sequence.

    Raises:
        InputError: `requested` is unknown or cannot run here.
    """
    if requested not in ("auto", *BACKENDS):
        raise InputError(
            f"attention: expected auto, {', '.join(BACKENDS[:-1])} or {BACKENDS[-1]}, "
            f"found {requested!r}; auto is safe"
        )
    obstacles = {
        "splash": splash_unsupported_reason(position, head_size, sequence_shards),
        "cudnn": cudnn_unsupported_reason(
            head_size,
            soft_cap=soft_cap,
            segments=segments,
            dtype=dtype,
            sequence_shards=sequence_shards,
        ),
    }
    for needs, kernel in KERNEL_OF.items():
        if platform != needs:
            obstacles[kernel] = f"it needs platform {needs} and this is {platform}"
    if requested != "auto":
        if obstacle := obstacles.get(requested):
            raise InputError(
                f'attention: {requested} cannot run, {obstacle}; use "auto" or "blockwise"'
            )
        return BackendChoice(requested, f"{requested} attention: requested")
    kernel = KERNEL_OF.get(platform)
    shape = f"{position} positions on {platform}"
    if kernel is None:
        seen = position if window is None else min(window, position)
        if position < BLOCKWISE_FROM:
            return BackendChoice(
                "reference",
                f"reference attention: auto, {shape}, where blockwise is not faster",
            )
        return BackendChoice(
            "blockwise", f"blockwise attention: auto, {shape} that attend to up to {seen}"
        )
    if obstacle := obstacles[kernel]:
        return BackendChoice(
            "blockwise", f"blockwise attention: auto, {shape}; not {kernel}: {obstacle}"
        )
    reason = f"{kernel} attention: auto, {shape}"
    if kernel == "splash" and only_narrow_tiles(position, head_size, sequence_shards):
        reason += ", with slow tiles: only 128 divides the sequence length; use a multiple of 512"
    return BackendChoice(kernel, reason)


def splash_unsupported_reason(
    position: int, head_size: int, sequence_shards: int = 1
) -> str | None:
    """The reason why the splash kernel cannot run these shapes, or None when it can."""
    if position % sequence_shards:
        return f"{position} positions do not divide over {sequence_shards} devices"
    if position // sequence_shards % LANES:
        each = f" on each of {sequence_shards} devices" if sequence_shards > 1 else ""
        return f"{position // sequence_shards} positions{each} are not a multiple of {LANES}"
    if head_size % 64:
        return f"a head size of {head_size} is not a multiple of 64"
    return None


def cudnn_unsupported_reason(
    head_size: int,
    *,
    soft_cap: float | None,
    segments: bool,
    dtype: str,
    sequence_shards: int = 1,
) -> str | None:
    """The reason why cuDNN cannot run this attention, or None when it can.

    Heads above 128 also need a Hopper GPU or newer, which JAX checks when it traces.
    """
    if soft_cap is not None:
        return f"its kernels have no soft cap, and the scores need one of {soft_cap}"
    if segments:
        return "JAX reads wrong keys for documents that share a sequence (docs/decisions)"
    if dtype not in DTYPES:
        return f"it computes in {' or '.join(DTYPES)}, not {dtype}"
    if head_size % 8 or head_size > WIDEST_HEAD:
        return f"a head size of {head_size} is not a multiple of 8 up to {WIDEST_HEAD}"
    if sequence_shards > 1:
        return f"its kernels need a whole sequence, and it is spread over {sequence_shards} devices"
    return None
