"""Saving and restoring a model with its optimizer's state: ours, and the machine's limits.

    python -m tests.bench.checkpoint --work DIR [--model llama_200m] [--layers N] [--repeat 3]

One JSON object a measurement, each in a process of its own. `limits`: copying as many bytes from
memory to memory with one thread and with as many as there are cores (into memory that was used
before), and writing (flushed), reading cold (out of the page cache) and reading warm as many bytes
in files of 32 MiB, four at a time. `ours`: seconds that `save` keeps its caller, beside a copy of
the same arrays by all cores just before (`copy_s`), and then until the checkpoint is stored;
seconds to restore onto the device, cold and warm. Processor seconds are of a save, all threads. The
first save has a figure of its own: it needs new memory.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
_FILE_BYTES, _PIECE_BYTES = 32 << 20, 8 << 20


def shapes_of(model: str, layers: int | None) -> dict[str, list[Any]]:
    """[shape, dtype] of every array of a model and its AdamW state, by name."""
    import dataclasses

    import jax

    from models.shape import presets
    from training.checkpoint import tree_names
    from training.config import OptimizerConfig, TrainConfig
    from training.optimizer import build
    from training.sharding.layout import make_layout
    from training.step.state import abstract_state

    layout = make_layout(jax.devices()[:1])
    config = getattr(presets, model)
    config = dataclasses.replace(config, layers=layers or config.layers)
    train = TrainConfig(steps=1, batch_size=1, sequence_length=2)
    state = abstract_state(config, build(OptimizerConfig()), layout, train)
    return {name: [list(x.shape), str(x.dtype)] for name, x in tree_names.flatten(state).items()}


def values(shapes: dict[str, list[Any]]) -> dict[str, np.ndarray]:
    """Arrays of {name: [shape, dtype]}: bits that no store can make smaller."""
    block = np.random.default_rng(0).standard_normal(1 << 22, np.float32)
    return {
        name: np.resize(block, math.prod(shape)).reshape(shape).astype(dtype)
        for name, (shape, dtype) in shapes.items()
    }


def timed(action: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


def rounds(name: str, figures: list[float]) -> dict[str, float]:
    """Fields for the least and the median of some seconds."""
    found = {"min": min(figures), "median": statistics.median(figures)}
    return {f"{name}_{which}": round(figure, 3) for which, figure in found.items()}


def files(directory: str) -> list[Path]:
    return [path for path in Path(directory).rglob("*") if path.is_file()]


def forget(directory: str) -> None:
    """Put what was written on the disk, and out of the page cache."""
    for path in files(directory):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def settle() -> None:
    """Return freed memory and flush disks, so that one measurement does not pay for another."""
    ctypes.CDLL(None).malloc_trim(0)
    os.sync()


def copied(targets: list[np.ndarray], sources: list[np.ndarray], threads: int) -> float:
    """Seconds to copy arrays from memory to memory that was used before, 8 MiB at a time."""
    pieces = []
    for target, source in zip(targets, sources, strict=True):
        flat, into, step = source.reshape(-1), target.reshape(-1), _PIECE_BYTES // source.itemsize
        for begin in range(0, flat.size, step):
            pieces.append((into[begin : begin + step], flat[begin : begin + step]))
    with ThreadPoolExecutor(threads) as pool:
        # The first time is for the pool's threads and the memory.
        return [timed(lambda: list(pool.map(lambda p: np.copyto(*p), pieces))) for _ in "12"][-1]


def ours(options: dict[str, Any]) -> dict[str, Any]:
    """Our checkpointer with the arrays on one device: saves in turn, then the last restored."""
    import jax

    from tests.training.tiny import like
    from training.checkpoint.checkpointer import Checkpointer
    from training.checkpoint.restore import restore

    state = jax.device_put(values(options["shapes"]), jax.devices()[0])
    arrays = [np.asarray(x) for x in state.values()]
    copy = [np.zeros_like(array) for array in arrays]
    checkpointer, last = Checkpointer(options["work"], attempt="a"), options["repeat"] + 1
    seconds: dict[str, list[float]] = {
        name: []
        for name in ("copy", "blocking", "background", "cpu", "restore_cold", "restore_warm")
    }
    for step in range(1, last + 1):
        settle()
        seconds["copy"].append(copied(copy, arrays, os.cpu_count() or 1))
        cpu = time.process_time()
        seconds["blocking"].append(timed(lambda step=step: checkpointer.save(step, state, {})))
        seconds["background"].append(timed(checkpointer.wait))
        seconds["cpu"].append(time.process_time() - cpu)
    path = checkpointer.path_of(last)
    for _ in range(options["repeat"]):
        forget(path)
        for name in ("restore_cold", "restore_warm"):
            seconds[name].append(timed(lambda: jax.block_until_ready(restore(path, like(state)))))
    line: dict[str, Any] = {"measure": "ours", "first_blocking_s": round(seconds["blocking"][0], 3)}
    for name, found in seconds.items():
        line |= rounds(f"{name}_s", found[-options["repeat"] :])
    stored = files(path)
    with open("/proc/self/status") as status:
        peak = next(line.split()[1] for line in status if line.startswith("VmHWM"))
    return line | {
        "files": len(stored),
        "stored_mib": round(sum(path.stat().st_size for path in stored) / 2**20),
        "peak_rss_mib": round(int(peak) / 1024),
        "versions": {name: version(name) for name in ("tensorstore", "jax", "numpy")},
    }


def limits(options: dict[str, Any]) -> dict[str, Any]:
    """What memory and disk of this machine do with as many bytes."""
    total = sum(x.nbytes for x in values(options["shapes"]).values())
    source, target = np.ones(total, np.uint8), np.zeros(total, np.uint8)
    line: dict[str, Any] = {"measure": "limits", "mib": round(total / 2**20)}
    for threads in sorted({1, os.cpu_count() or 1}):
        seconds = [copied([target], [source], threads) for _ in range(options["repeat"])]
        line |= rounds(f"copy_{threads}_threads_s", seconds)
    work, begins = Path(options["work"]), range(0, total, _FILE_BYTES)

    def write(begin: int) -> None:
        with open(work / str(begin), "wb") as file:
            file.write(source[begin : begin + _FILE_BYTES].data)
            file.flush()
            os.fsync(file.fileno())

    def read(begin: int) -> None:
        with open(work / str(begin), "rb", buffering=0) as file:
            file.readinto(target[begin : begin + _FILE_BYTES].data)

    figures: dict[str, list[float]] = {"write_s": [], "read_cold_s": [], "read_warm_s": []}
    with ThreadPoolExecutor(4) as pool:
        for _ in range(options["repeat"]):
            settle()
            for name, action in zip(figures, (write, read, read), strict=True):
                figures[name].append(timed(lambda do=action: list(pool.map(do, begins))))
                if name == "write_s":
                    forget(options["work"])
            for path in files(options["work"]):
                path.unlink()
    for name, found in figures.items():
        line |= rounds(name, found)
    return line | {"cpus": os.cpu_count(), "versions": {"numpy": version("numpy")}}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the measurements, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", help="a directory on the disk to measure; default a temporary")
    parser.add_argument("--model", default="llama_200m", help="of models/shape/presets.py")
    parser.add_argument("--layers", type=int, help="instead of the model's")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--measure", choices=("ours", "limits"), help=argparse.SUPPRESS)
    parser.add_argument("--options", type=json.loads, help=argparse.SUPPRESS)
    flags = parser.parse_args(arguments)
    if flags.measure:
        found = {"ours": ours, "limits": limits}[flags.measure](flags.options)
        print(json.dumps(found), flush=True)
        return 0
    platforms = os.environ.get("JAX_PLATFORMS", "cpu")
    os.environ["JAX_PLATFORMS"] = "cpu"  # here: an accelerator is for one process at a time
    options = {"shapes": shapes_of(flags.model, flags.layers), "repeat": flags.repeat}
    for name in ("limits", "ours"):
        with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=flags.work) as work:
            command = [sys.executable, "-m", "tests.bench.checkpoint", "--measure", name]
            done = subprocess.run(
                [*command, "--options", json.dumps({**options, "work": work})],
                cwd=ROOT,
                env={**os.environ, "JAX_PLATFORMS": platforms},
                stdout=subprocess.PIPE,
                text=True,
                check=False,
            )
        failed = json.dumps({"measure": name, "failed": done.returncode})
        print(failed if done.returncode else done.stdout.strip(), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
