"""The choice of an attention back end, and what each can run; imports no JAX, for plans too."""

from __future__ import annotations

from typing import NamedTuple

from models.shape import tpu_tiles
from models.shape.splash_tiles import LANES, only_narrow_tiles, row_cycles
from pipeline.errors import InputError

BACKENDS = ("reference", "blockwise", "ponente", "splash", "cudnn", "triton")
KERNELS_OF = {"tpu": ("ponente", "splash"), "gpu": ("cudnn", "triton")}
"""By platform; "auto" takes the first that can run."""
MADE_FOR = "v6e"
"""The chip of our kernel: v4 and v5p have less vector memory; no other's schedule was read."""
TRITON_TILE = 128
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
    normalized: bool = False,
    chip: str = "",
) -> BackendChoice:
    """The attention back end for these shapes and devices, and the reason for it.

    Args:
        platform: of the devices that will run the program: "tpu", "cpu" or "gpu" (NVIDIA).
        sequence_shards: devices that share the positions of one sequence.
        normalized: whether queries and keys are, as with QK-norm.
        chip: its name in `pipeline.accelerators`, or "".
    """
    if requested not in ("auto", *BACKENDS):
        raise InputError(
            f"attention: expected auto, {', '.join(BACKENDS[:-1])} or {BACKENDS[-1]}, "
            f"found {requested!r}; auto is safe"
        )

    def obstacle_of(backend: str) -> str | None:
        needs = next((p for p, kernels in KERNELS_OF.items() if backend in kernels), platform)
        if needs != platform:
            return f"it needs platform {needs} and this is {platform}"
        if backend == "ponente" and chip != MADE_FOR:
            return f"it is made for {MADE_FOR} and this is {chip or 'not known'}"
        return kernel_obstacle(
            backend,
            position=position,
            head_size=head_size,
            soft_cap=soft_cap,
            segments=segments,
            window=window,
            dtype=dtype,
            sequence_shards=sequence_shards,
        )

    if requested != "auto":
        if obstacle := obstacle_of(requested):
            raise InputError(
                f'attention: {requested} cannot run, {obstacle}; use "auto" or "blockwise"'
            )
        about = _about_ponente(normalized, soft_cap) if requested == "ponente" else ""
        return BackendChoice(requested, f"{requested} attention: requested{about}")
    found = {kernel: obstacle_of(kernel) for kernel in KERNELS_OF.get(platform, ())}
    possible = [kernel for kernel, obstacle in found.items() if obstacle is None]
    others = "".join(f"; not {kernel}: {why}" for kernel, why in found.items() if why)
    backend, shape = "blockwise", f"{position} positions on {platform}"
    if not found and position < BLOCKWISE_FROM:
        backend, more = "reference", ", where blockwise is not faster"
    elif not found:
        more = f" that attend to up to {position if window is None else min(window, position)}"
    elif not possible:
        more = others
    else:
        backend, more = possible[0], others if possible[0] != next(iter(found)) else ""
        if backend == "ponente":
            shift = tpu_tiles.needs_shift(normalized, soft_cap)
            row = tpu_tiles.Row(position // sequence_shards, position, head_size, window, shift)
            backend, more = _cheaper(row, _about_ponente(normalized, soft_cap))
        if backend == "splash" and only_narrow_tiles(position, head_size, sequence_shards):
            more = ", with slow tiles: only 128 divides the sequence length; use a multiple of 512"
    return BackendChoice(backend, f"{backend} attention: auto, {shape}{more}")


def _cheaper(row: tpu_tiles.Row, about: str) -> tuple[str, str]:
    """The TPU kernel with fewer scheduled cycles for a row, and what to say of it."""
    theirs = row_cycles(row.keys, row.head_size, row.window, row.keys // row.queries)
    ratio = sum(tpu_tiles.row_cycles(row, tpu_tiles.choose_sight(row))) / theirs
    if ratio > 1:
        return "splash", f"; ponente has {ratio:.2f} times its scheduled cycles"
    return "ponente", f"; {ratio:.2f} of splash's scheduled cycles{about}"


def _about_ponente(normalized: bool, soft_cap: float | None) -> str:
    """How its scores are shifted, and that it has never run on a chip."""
    shift = "scores less a running maximum"
    if not tpu_tiles.needs_shift(normalized, soft_cap):
        shift = f"scores unshifted up to {tpu_tiles.SAFE:.0f}"
        shift += " (QK-norm)" if normalized else " (soft cap)"
    return f", never run on a chip; {shift}"


def kernel_obstacle(
    backend: str,
    *,
    position: int,
    head_size: int,
    soft_cap: float | None,
    segments: bool,
    window: int | None,
    dtype: str,
    sequence_shards: int,
) -> str | None:
    """The reason why a back end cannot run this attention, or None; the plain ones always can.

    For cuDNN, heads above 128 also need a Hopper GPU or newer, which JAX checks when it traces.
    """
    if backend in ("ponente", "splash"):
        if position % sequence_shards:
            return f"{position} positions do not divide over {sequence_shards} devices"
        if position // sequence_shards % LANES:
            each = f" on each of {sequence_shards} devices" if sequence_shards > 1 else ""
            return f"{position // sequence_shards} positions{each} are not a multiple of {LANES}"
        if head_size % 64:
            return f"a head size of {head_size} is not a multiple of 64"
    if backend == "ponente":
        if dtype == "float16":
            return "its exponentials need the exponents of bfloat16 or float32, not float16"
        row = tpu_tiles.Row(position // sequence_shards, position, head_size, window, shift=True)
        sight, itemsize = tpu_tiles.choose_sight(row), 2 if dtype in DTYPES else 4
        if not tpu_tiles.buffers_of(row, sight, itemsize, segments):
            return f"vector memory cannot hold {position} keys of {head_size}"
    if backend == "cudnn":
        if soft_cap is not None:
            return f"its kernels have no soft cap, and the scores need one of {soft_cap}"
        if segments:
            return "JAX reads wrong keys for documents that share a sequence (docs/decisions)"
        if dtype not in DTYPES:
            return f"it computes in {' or '.join(DTYPES)}, not {dtype}"
        if head_size % 8 or head_size > WIDEST_HEAD:
            return f"a head size of {head_size} is not a multiple of 8 up to {WIDEST_HEAD}"
    if backend == "triton":
        if not segments:
            return "it is for documents that share a sequence, and cudnn is faster without"
        if soft_cap is not None or window is not None:
            return "its kernels have no soft cap and no window"
        if dtype not in DTYPES:
            return f"it computes in {' or '.join(DTYPES)}, not {dtype}"
        if position % TRITON_TILE:
            return f"{position} positions are not a multiple of {TRITON_TILE}"
        if head_size not in (64, 128):
            return f"a head size of {head_size} is not 64 or 128, for which it was tuned"
    if backend in ("cudnn", "triton") and sequence_shards > 1:
        return f"its kernels need a whole sequence, and {sequence_shards} devices share one"
    return None
