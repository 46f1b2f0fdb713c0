"""Cycles of attention's kernels for TPUs, from the schedule that the TPU compiler makes.

    python -m tests.bench.attention_cycles --head 64 --positions 8192

Compiles each kernel alone for one described v6e chip, with the tiles that the model would get, and
counts the instruction bundles of the compiler's final schedule, one cycle each, as often as a row
of one head runs them. One JSON line for each kernel and row: `forward` and `backward`, and both for
1,000 scores that are seen. A grid step costs what `models.shape.splash_tiles` assumes. With
`--segments` all keys of a row have one segment, but every chunk is computed as if several met in
it. The schedule knows nothing of waiting for memory: use it to rank.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

LIMIT = {"xla_tpu_scoped_vmem_limit_kib": "98304"}


class Case(NamedTuple):
    """One row to count."""

    kernel: str
    head: int
    positions: int
    window: int | None
    segments: bool
    shift: bool
    tile: tuple[int, ...] | None


class Region(NamedTuple):
    """Instructions between two branches, and whether they begin a loop's body."""

    bundles: int
    loop: bool


def main(arguments: list[str] | None = None) -> None:
    """Print the measurements as JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernel", choices=("ponente", "splash"), action="append")
    parser.add_argument("--head", type=int, action="append", help="head size")
    parser.add_argument("--positions", type=int, nargs="+", default=[2048, 4096, 8192, 16384])
    parser.add_argument("--window", type=int, nargs="+", default=[None])
    parser.add_argument("--segments", action="store_true")
    parser.add_argument(
        "--shift", action="store_true", help="a running maximum, as without QK-norm"
    )
    parser.add_argument("--tile", help="BLOCKxCHUNK, or QUERIESxKEYSxCOMPUTE of splash")
    options = parser.parse_args(arguments)
    tile = tuple(int(size) for size in options.tile.split("x")) if options.tile else None
    with Compiler() as compiler:
        for head in options.head or (64, 128, 256):
            for kernel in options.kernel or ("ponente", "splash"):
                for positions in options.positions:
                    for window in options.window:
                        case = Case(
                            kernel, head, positions, window, options.segments, options.shift, tile
                        )
                        print(json.dumps(_line(case, compiler)), flush=True)


def _line(case: Case, compiler: Compiler) -> dict[str, Any]:
    began = time.perf_counter()
    line: dict[str, Any] = case._asdict()
    try:
        count = _ponente if case.kernel == "ponente" else _splash
        line["tile"], forward, backward = count(case, compiler)
    except RuntimeError as error:  # the compiler's refusal
        return line | {"error": str(error).splitlines()[0][:300]}
    seen = case.positions * (case.positions + 1) // 2
    if case.window is not None and case.window < case.positions:
        hidden = case.positions - case.window
        seen -= hidden * (hidden + 1) // 2
    return line | {
        "forward": int(forward),
        "backward": int(backward),
        "forward_per_1000": round(1000 * forward / seen, 3),
        "backward_per_1000": round(1000 * backward / seen, 3),
        "seconds": round(time.perf_counter() - began, 1),
    }


class Compiler:
    """The TPU compiler, which writes its schedules into a folder."""

    def __enter__(self) -> Compiler:
        self._folder = Path(tempfile.mkdtemp(prefix="attention-cycles-"))
        # JAX and libtpu read the environment when they start.
        os.environ["LIBTPU_INIT_ARGS"] = (
            f"--xla_jf_dump_to={self._folder} --xla_jf_dump_llo_text=true"
        )
        from training.preflight import describe

        self._device = describe("v6e-1")[0]
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def array(self, *shape: int, dtype: str = "bfloat16") -> Any:
        import jax

        sharding = jax.sharding.SingleDeviceSharding(self._device)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def regions(self, function: Any, *arrays: Any) -> list[Region]:
        """The regions of the only kernel in a function's schedule."""
        import jax

        with jax.numpy_rank_promotion("allow"):
            jax.jit(function).lower(*arrays).compile(LIMIT)
        names = r"(ponente|splash_mha).*-\d+-final_bundles\.txt$"
        (path,) = [file for file in self._folder.iterdir() if re.search(names, file.name)]
        found = list(_regions(path.read_text()))
        for file in self._folder.iterdir():
            shutil.rmtree(file) if file.is_dir() else file.unlink()
        return found


def _regions(text: str) -> Iterator[Region]:
    begin, last, loop = 0, 0, False
    for line in text.splitlines():
        if found := re.match(r" *(0x[0-9a-f]+|\d+) *(LB|PB|PF|LE)?[ :]", line):
            last = int(found[1], 0)
            if found[2] is not None:
                yield Region(last - begin, loop)
                begin, loop = last, found[2] == "LB"
    yield Region(last - begin, loop)


def _ponente(case: Case, compiler: Compiler) -> tuple[list[int], float, float]:
    from models.attention import tpu_kernel
    from models.attention.tpu_scores import Shape
    from models.shape.tpu_tiles import STEP_CYCLES, Row, Sight, buffers_of, choose_sight

    row = Row(case.positions, case.positions, case.head, case.window, case.shift)
    sight = Sight(*case.tile, case.window) if case.tile else choose_sight(row)
    if case.window is not None and case.window >= case.positions:
        sight = replace(sight, window=None)
    shape = Shape(
        heads=1,
        kv_heads=1,
        queries=case.positions,
        keys=case.positions,
        head_size=case.head,
        sight=sight,
        soft_cap=None,
        segments=case.segments,
        shift=case.shift,
        buffers=buffers_of(row, sight, 2, case.segments) or 1,
    )
    head = compiler.array(1, 1, case.head, case.positions)
    sums = compiler.array(1, 1, 1, case.positions, dtype="float32")
    ids = compiler.array(1, case.positions, dtype="int32")
    ids = (ids, ids) if case.segments else None
    starts = compiler.array(shape.blocks, dtype="int32")

    def backward(starts: Any, q: Any, out: Any, sums: Any, ids: Any) -> Any:
        return tpu_kernel.backward(shape, starts, (q, q, q), ids, (out, sums), out)

    forward = functools.partial(tpu_kernel.forward, shape)
    found = (
        (compiler.regions(forward, starts, head, head, head, ids), not case.shift),
        (compiler.regions(backward, starts, head, head, sums, ids), False),
    )
    groups = sight.partial()
    chunks = case.positions // sight.chunk

    def cycles(regions: list[Region], slow: bool) -> float:
        """The largest regions are, in order: loop's bodies, groups of partial chunks, slow loop."""
        bodies = (2 if case.segments else 1) if sight.whole != 0 else 0
        parts = [offsets for offsets in groups if offsets]
        sizes = sorted((each.bundles for each in regions), reverse=True)
        least = sizes[bodies + len(parts) + slow - 1]
        large = [each.bundles for each in regions if each.bundles >= least]
        rest = [each for each in regions if each.bundles < least]
        body = large[bodies - 1] if bodies else 0  # the masked one
        of_groups = dict(zip([i for i, g in enumerate(groups) if g], large[bodies:], strict=False))
        total = 0.0
        for block in range(shape.blocks):
            before = block * sight.block // sight.chunk
            total += body * (before if sight.whole is None else min(before, sight.whole))
            total += sum(size for back, size in of_groups.items() if block >= back)
        steps = sum(each.bundles for each in rest if not each.loop) + STEP_CYCLES
        once = sum(each.bundles for each in rest if each.loop)
        return total + shape.blocks * steps + chunks * once

    return [sight.block, sight.chunk], *(cycles(*each) for each in found)


def _splash(case: Case, compiler: Compiler) -> tuple[list[int], float, float]:
    from models.attention import splash
    from models.shape.splash_tiles import STEP_CYCLES, ScoreMatrix, compute_block

    window = None if case.window is None or case.window >= case.positions else case.window
    kernel = splash.Kernel(1, case.positions, case.head, window, None)
    built = splash.build(kernel)
    sizes = built.kwargs["block_sizes"]
    if case.tile:
        raise RuntimeError("the tiles of splash are those of choose_tiles")
    head = compiler.array(1, case.positions, case.head)
    sums = compiler.array(1, case.positions, dtype="float32")
    ids = compiler.array(case.positions, dtype="int32")
    ids = splash.SegmentIds(q=ids, kv=ids) if case.segments else None

    def backward(q: Any, out: Any, sums: Any, ids: Any) -> Any:
        return splash.backward_kernels(built, (q, q, q, ids, None, sums, out, sums))

    def only(index: int) -> Any:
        def run(*arrays: Any) -> Any:
            found = backward(*arrays)
            return found[0] if index == 0 else found[1:]

        return run

    forward = compiler.regions(lambda q, ids: built(q, q, q, ids), head, ids)
    fused = sizes.use_fused_bwd_kernel
    arrays = (head, head, sums, ids)
    keys_tile = (sizes.block_q_dkv, sizes.block_kv_dkv)
    runs = [("forward", (sizes.block_q, sizes.block_kv), forward)]
    if fused:
        runs.append(("fused", keys_tile, compiler.regions(backward, *arrays)))
    else:
        runs.append(("keys_values", keys_tile, compiler.regions(only(1), *arrays)))
        queries_tile = (sizes.block_q_dq, sizes.block_kv_dq)
        runs.append(("queries", queries_tile, compiler.regions(only(0), *arrays)))
    cycles = []
    for name, tile, regions in runs:
        # The largest region is a tile's work; the rest runs once for a row of tiles.
        grid = ScoreMatrix(case.positions, case.positions, window).grid(tile, name)
        work = max(each.bundles for each in regions)
        rest = sum(each.bundles for each in regions) - work
        bands = case.positions // tile[0 if name in ("forward", "queries") else 1]
        row = grid.visited * work + grid.steps * STEP_CYCLES + bands * rest
        cycles.append(
            row + (grid.partial_sums(tile, case.head) if fused and name == "fused" else 0)
        )
    tile = [sizes.block_q, sizes.block_kv, compute_block(sizes.block_kv), *keys_tile]
    return tile, cycles[0], sum(cycles[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
