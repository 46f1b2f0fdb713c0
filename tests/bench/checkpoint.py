"""Saving and restoring a model with its optimizer's state: ours, and the machine's limits.

    python -m tests.bench.checkpoint --work DIR [--model llama_200m] [--layers N] [--repeat 3]

One JSON object a measurement, each in a process of its own. `limits`: copying as many bytes from
memory to memory with one thread and with as many as there are cores (into memory that was used
before), and writing (flushed), reading cold (out of the page cache) and reading warm as many bytes
in files of 32 MiB, four at a time. `ours`: seconds that `save` keeps its caller, beside a copy of
the same arrays by all cores just before (`copy_s`), and then until the checkpoint is stored;
seconds to restore onto the device, cold and warm. Processor seconds are of a save, all threads. The
first save is told apart: it needs new memory.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from tests.bench import checkpoint_measure as common

ROOT = Path(__file__).parents[2]
_FILE_BYTES = 32 << 20


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


def ours(options: dict[str, Any]) -> None:
    """Our checkpointer with the arrays on one device."""
    import jax

    from training.checkpoint.checkpointer import Checkpointer
    from training.checkpoint.restore import restore as restored

    state = jax.device_put(common.values(options["shapes"]), jax.devices()[0])
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    checkpointer = Checkpointer(options["work"], attempt="a")

    def directory(step: int) -> str:
        return f"{options['work']}/{step:08d}.a"

    def save(step: int) -> Any:
        checkpointer.save(step, state, {"rows": []})
        return checkpointer.wait

    line = common.measure(
        "ours",
        *(save, lambda step: jax.block_until_ready(restored(directory(step), like)), directory),
        [np.asarray(x) for x in state.values()],
        options["repeat"],
        versions=common.versions("tensorstore", "jax", "numpy"),
    )
    checkpointer.wait()
    common.emit(line)


def limits(options: dict[str, Any]) -> None:
    """What memory and disk of this machine do with as many bytes."""
    total = sum(x.nbytes for x in common.values(options["shapes"]).values())
    source, target = np.ones(total, np.uint8), np.zeros(total, np.uint8)
    line: dict[str, Any] = {"measure": "limits", "mib": round(total / 2**20)}
    for threads in sorted({1, os.cpu_count() or 1}):
        seconds = [common.copied([target], [source], threads) for _ in range(options["repeat"])]
        line |= common.rounds(f"copy_{threads}_threads_s", seconds)
    work = Path(options["work"])
    pieces = [(i, source[begin : begin + _FILE_BYTES]) for i, begin in _cuts(total)]
    figures: dict[str, list[float]] = {"write_s": [], "read_cold_s": [], "read_warm_s": []}
    with ThreadPoolExecutor(4) as pool:
        for _ in range(options["repeat"]):
            common.settle()
            clock = common.Clock()
            list(pool.map(lambda piece: _write(work / str(piece[0]), piece[1]), pieces))
            figures["write_s"].append(clock.wall())
            common.forget(work)
            for name in ("read_cold_s", "read_warm_s"):
                clock = common.Clock()
                list(pool.map(lambda piece: _read(work / str(piece[0]), target), pieces))
                figures[name].append(clock.wall())
            for path in common.files(work):
                path.unlink()
    for name, seconds in figures.items():
        line |= common.rounds(name, seconds)
    common.emit(line | {"cpus": os.cpu_count(), "versions": common.versions("numpy")})


def _cuts(total: int) -> list[tuple[int, int]]:
    return list(enumerate(range(0, total, _FILE_BYTES)))


def _write(path: Path, data: np.ndarray) -> None:
    with open(path, "wb") as file:
        file.write(data.data)
        file.flush()
        os.fsync(file.fileno())


def _read(path: Path, target: np.ndarray) -> None:
    begin = int(path.name) * _FILE_BYTES
    with open(path, "rb", buffering=0) as file:
        file.readinto(target[begin : begin + _FILE_BYTES].data)


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
        {"ours": ours, "limits": limits}[flags.measure](flags.options)
        return 0
    platforms = os.environ.get("JAX_PLATFORMS", "cpu")
    os.environ["JAX_PLATFORMS"] = "cpu"  # here: an accelerator is for one process at a time
    options = {
        "platforms": platforms,
        "shapes": shapes_of(flags.model, flags.layers),
        "repeat": flags.repeat,
    }
    mine = [sys.executable, "-m", "tests.bench.checkpoint", "--measure"]
    for name in ("limits", "ours"):
        _run([*mine, name, "--options"], name, options, flags.work)
    return 0


def _run(command: list[str], name: str, options: dict[str, Any], work: str | None) -> None:
    directory = tempfile.mkdtemp(prefix="checkpoint-", dir=work)
    environment = {**os.environ, "JAX_PLATFORMS": options["platforms"]}
    try:
        text = json.dumps({**options, "work": directory})
        done = subprocess.run(
            [*command, text],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith('{"measure"')]
        for line in lines:
            print(line, flush=True)
        if done.returncode or not lines:
            reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
            common.emit({"measure": name, "failed": reason})
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    raise SystemExit(main())
