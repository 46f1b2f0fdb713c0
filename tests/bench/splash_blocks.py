"""Cost of splash attention by tile sizes, from the schedule that the TPU compiler makes.

    python -m tests.bench.splash_blocks --head-size 64 --head-size 128 --position 4608 8192

Compiles each kernel alone for one described v6e chip and counts the instruction bundles of the
block's work in the compiler's final schedule, one cycle each; the rest of the kernel runs once for
a row of blocks. A block that the mask hides in part costs as much as a full one. One JSON line for
each kernel and one for each row length and window, in cycles of one head of one row, with the price
of a grid step that `models.shape.splash_tiles` assumes. The schedule knows nothing of waiting
for memory: use it to rank.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import math
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WIDE_KIB, DEFAULT_KIB = 98_304, 32_768
TILES = ((2048, 2048), (1024, 1024), (1024, 2048), (2048, 1024), (512, 512), (512, 1024))
ODD_TILES = ((1536, 1536), (2304, 2304), (768, 768))
COMPUTE = (512, 1024, 256)
KERNELS = ("forward", "fused", "dkv", "dq")


@dataclasses.dataclass(frozen=True)
class Case:
    """One kernel to compile."""

    kernel: str
    head_size: int
    block_q: int
    block_kv: int
    compute: int
    windowed: bool
    layout: str


def main(arguments: list[str] | None = None) -> None:
    """Print the measurements as JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--head-size", type=int, action="append")
    parser.add_argument("--position", type=int, nargs="+", default=[2048, 4608, 8192, 16384])
    parser.add_argument("--window", type=int, nargs="*", default=[])
    parser.add_argument("--kernel", choices=KERNELS, action="append")
    parser.add_argument("--tile", help="QUERIESxKEYSxCOMPUTE", action="append")
    parser.add_argument("--layout", default="sss", help="of q, k and v: s or h, what lies minor")
    parser.add_argument("--default-limit", action="store_true", help="also try 32 MiB of VMEM")
    options = parser.parse_args(arguments)
    folder = Path(tempfile.mkdtemp(prefix="splash-blocks-"))
    os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
    try:
        for case in _cases(options):
            line = _measure(case, folder, options.default_limit)
            _print(line)
            if line["compiles"]:
                for position, window in _rows(options, case):
                    _print(_row(line, position, window))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _cases(options: argparse.Namespace) -> Iterator[Case]:
    if options.tile:
        tiles = [tuple(int(part) for part in tile.split("x")) for tile in options.tile]
    else:
        tiles = [(*tile, c) for tile, c in itertools.product(TILES + ODD_TILES, COMPUTE)]
    for head_size in options.head_size or (64, 128, 256):
        for (q, kv, compute), kernel in itertools.product(tiles, options.kernel or KERNELS):
            # The dq kernel has no inner tile: ask for it once.
            if kv % compute == 0 and (kernel != "dq" or compute == 512):
                yield Case(kernel, head_size, q, kv, compute, bool(options.window), options.layout)


def _rows(options: argparse.Namespace, case: Case) -> Iterator[tuple[int, int | None]]:
    for position in options.position:
        if position % case.block_q == 0 and position % case.block_kv == 0:
            for window in options.window or [None]:
                yield position, window


def _measure(case: Case, folder: Path, default_limit: bool) -> dict[str, Any]:
    started = time.perf_counter()
    line: dict[str, Any] = {"measured": "kernel", **dataclasses.asdict(case)}
    error = _compile(case, WIDE_KIB)
    line["compiles"] = error is None
    if error is None:
        line |= _schedule(folder)
    else:
        line["error"] = error
    _clear(folder)
    if default_limit:
        line["compiles_in_32_MiB"] = _compile(case, DEFAULT_KIB) is None
        _clear(folder)
    return line | {"seconds": round(time.perf_counter() - started, 1)}


def _compile(case: Case, limit_kib: int) -> str | None:
    """Compile the kernel; the first line of what the compiler says where it cannot."""
    # JAX reads the environment when it starts, and `describe` sets it.
    device = _device()
    import jax
    from jax import numpy as jnp
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    position = 2 * math.lcm(case.block_q, case.block_kv)
    shape = (position, position)
    window = (case.block_kv - 1, 0)
    mask = masks.LocalMask(shape, window, 0) if case.windowed else masks.CausalMask(shape)
    built = kernel.make_splash_mha(
        masks.MultiHeadMask([mask] * 2),
        block_sizes=_block_sizes(case),
        head_shards=1,
        q_seq_shards=1,
        save_residuals=True,
    )
    sharding = jax.sharding.SingleDeviceSharding(device)
    array = jax.ShapeDtypeStruct((2, position, case.head_size), jnp.bfloat16, sharding=sharding)
    row = jax.ShapeDtypeStruct((2, position), jnp.float32, sharding=sharding)
    if case.kernel == "forward":
        lowered = jax.jit(built).lower(array, array, array)
    else:
        run = functools.partial(_backward, case.kernel, built)
        lowered = jax.jit(run).lower(array, array, array, array, row, row)
    try:
        lowered.compile({"xla_tpu_scoped_vmem_limit_kib": str(limit_kib)})
    except jax.errors.JaxRuntimeError as error:
        return str(error).splitlines()[0][:300]
    return None


def _backward(which: str, built: Any, q: Any, k: Any, v: Any, bar: Any, lse: Any, di: Any) -> Any:
    from models.attention.splash import backward_kernels

    q_bar, k_bar, v_bar = backward_kernels(built, (q, k, v, None, None, lse, bar, di))
    return q_bar if which == "dq" else (k_bar, v_bar) if which == "dkv" else (q_bar, k_bar, v_bar)


def _block_sizes(case: Case) -> Any:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel

    layouts = kernel.QKVLayout
    q, k, v = (layouts.SEQ_MINOR if at == "s" else layouts.HEAD_DIM_MINOR for at in case.layout)
    split = case.kernel != "fused"
    return kernel.BlockSizes(
        block_q=case.block_q,
        block_kv=case.block_kv,
        block_kv_compute=case.compute,
        block_q_dkv=case.block_q,
        block_kv_dkv=case.block_kv,
        block_kv_dkv_compute=case.compute,
        block_q_dq=case.block_q if split else None,
        block_kv_dq=case.block_kv if split else None,
        use_fused_bwd_kernel=not split,
        q_layout=q,
        k_layout=k,
        v_layout=v,
    )


@functools.cache
def _device() -> Any:
    from training.preflight import describe

    return describe("v6e-1")[0]


def _schedule(folder: Path) -> dict[str, Any]:
    """Bundles of the largest branch, which is the block's work, and of everything else."""
    (path,) = [
        file
        for file in folder.iterdir()
        if re.search(r"splash_mha.*-\d+-final_bundles\.txt$", file.name)
    ]
    edges, last = [0], 0
    for text in path.read_text().splitlines():
        if found := re.match(r" *(0x[0-9a-f]+|\d+) *(LB|PB|PF|LE)?[ :]", text):
            last = int(found[1], 0)
            if found[2] is not None:
                edges.append(last)
    edges.append(last)
    sizes = [after - before for before, after in itertools.pairwise(edges)]
    return {"bundles": max(sizes), "other_bundles": last - max(sizes), "regions": sizes}


def _row(line: dict[str, Any], position: int, window: int | None) -> dict[str, Any]:
    """Cycles of one head of one row: visited blocks, steps of the grid, rows of blocks."""
    from models.shape.splash_tiles import STEP_CYCLES, ScoreMatrix

    tile = (line["block_q"], line["block_kv"])
    kernel = {"dkv": "keys_values", "dq": "queries"}.get(line["kernel"], line["kernel"])
    grid = ScoreMatrix(position, position, window).grid(tile, kernel)
    bands = position // (tile[0] if kernel in ("forward", "queries") else tile[1])
    cycles = grid.visited * line["bundles"] + grid.steps * STEP_CYCLES
    cycles += bands * line["other_bundles"]
    cycles += grid.partial_sums(tile, line["head_size"]) if kernel == "fused" else 0.0
    seen = position * (position + 1) / 2
    if window is not None and window < position:
        seen -= (position - window) * (position - window + 1) / 2
    names = ("kernel", "head_size", "block_q", "block_kv", "compute", "layout")
    return {
        "measured": "row",
        **{name: line[name] for name in names},
        "position": position,
        "window": window,
        "visited": grid.visited,
        "steps": grid.steps,
        "useful_share": round(seen / (grid.visited * math.prod(tile)), 3),
        "cycles": int(cycles),
    }


def _clear(folder: Path) -> None:
    for file in folder.iterdir():
        shutil.rmtree(file) if file.is_dir() else file.unlink()


def _print(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
