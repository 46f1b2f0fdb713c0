"""One process of the tests of checkpoints by several: saves and restores, reports as JSON.

Arguments: folder, result file, number of processes, index, port.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

SHAPES = {"rows": (16, 6), "columns": (6, 24), "whole": (40, 3), "step": ()}
SPECS = {"rows": ("x",), "columns": (None, "x"), "whole": (), "step": ()}
OTHER_SPECS = {"rows": (), "columns": (), "whole": ("x",), "step": ()}


def expected(step: int) -> dict[str, np.ndarray]:
    numbers = np.random.default_rng(step)
    return {name: numbers.random(shape, np.float32) for name, shape in SHAPES.items()}


def shardings(devices: list[Any], specs: dict[str, tuple[Any, ...]]) -> dict[str, NamedSharding]:
    mesh = Mesh(np.array(devices), ("x",))
    return {name: NamedSharding(mesh, PartitionSpec(*spec)) for name, spec in specs.items()}


def state(step: int) -> dict[str, jax.Array]:
    """The values saved at a step, on all devices of all processes."""
    where = shardings(jax.devices(), SPECS)
    return {
        name: jax.make_array_from_callback(
            value.shape, where[name], lambda index, value=value: value[index]
        )
        for name, value in expected(step).items()
    }


def like(devices: list[Any], specs: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    return {
        name: jax.ShapeDtypeStruct(SHAPES[name], np.float32, sharding=sharding)
        for name, sharding in shardings(devices, specs).items()
    }


def is_right(found: dict[str, jax.Array], step: int) -> bool:
    """Whether this process's shards have the bits that were saved."""
    return all(
        np.asarray(shard.data).tobytes() == value[shard.index].tobytes()
        for name, value in expected(step).items()
        for shard in found[name].addressable_shards
    )


def outcome(action: Any) -> str:
    try:
        action()
    except Exception as error:  # noqa: BLE001 - whatever it is, the report names it
        return f"{type(error).__name__}: {error}"
    return ""


def await_file(path: str) -> None:
    """Until it is there, at most a minute."""
    for _ in range(1200):
        if os.path.exists(path):
            return
        time.sleep(0.05)
    raise TimeoutError(path)


def failing(error: Exception | None) -> Callable[[], bool]:

    def check() -> bool:
        if error is not None:
            raise error
        return True

    return check


def main() -> None:
    root, output, count, index, port = sys.argv[1:6]
    from pipeline.errors import CorruptOutput, StoreUnavailable
    from tests.training.tiny import Heard
    from training.checkpoint import files
    from training.checkpoint.checkpointer import Checkpointer
    from training.checkpoint.restore import restore
    from training.sharding.distributed import joined

    restore_module = sys.modules["training.checkpoint.restore"]
    gang = joined(f"127.0.0.1:{port}", int(count), int(index))
    gang.__enter__()
    leader, heard = index == "0", Heard()
    checkpointer = Checkpointer(root, heard, attempt="a")
    report: dict[str, Any] = {}
    first = state(1)
    # The others begin when process 0 has come back: a save that met them would never do so.
    if not leader:
        await_file(f"{root}/saved")
    path = checkpointer.save(1, first, {"rows": [1]})
    if leader:
        with open(f"{root}/saved", "w"):
            pass
    checkpointer.wait()
    await_file(f"{path}/index.json")
    for specs in (SPECS, OTHER_SPECS):
        report.setdefault("right", []).append(
            is_right(restore(path, like(jax.devices(), specs)), 1)
        )
    report["committed"] = heard.committed
    of_one_process = restore(f"{root}/00000009.one", like(jax.devices(), SPECS), step=9)
    report["right"].append(is_right(of_one_process, 9))
    write = files._write_local
    if not leader:  # a disk that is full here and nowhere else

        def full(url: str, parts: Any) -> None:
            raise OSError(28, "No space left on device")

        files._write_local = full
    checkpointer.save(2, state(2), {})
    report["full"] = outcome(checkpointer.wait)
    files._write_local = write
    read = restore_module.read_index
    if not leader:  # a store that fails once, here and nowhere else

        def fail_once(url: str) -> Any:
            restore_module.read_index = read
            raise StoreUnavailable(f"{url}: 503")

        restore_module.read_index = fail_once
    report["passing"] = outcome(lambda: restore(path, like(jax.devices(), SPECS)))
    if leader:
        impatient = Checkpointer(root, attempt="b", timeout_seconds=1.0)
        impatient.save(3, state(3), {})
        report["absent"] = outcome(impatient.wait)
        shutil.copytree(path, f"{root}/kept")
        os.unlink(f"{path}/arrays/rows/c.0.0")
        with open(f"{root}/damaged", "w"):
            pass
    else:
        await_file(f"{root}/damaged")
    # Process 0 alone needs the first rows.
    report["damaged"] = outcome(lambda: restore(path, like(jax.devices(), SPECS)))
    for name, errors in (
        ("mixed", (CorruptOutput("torn"), StoreUnavailable("503"))),
        ("unexpected", (StoreUnavailable("503"), KeyError("a bug"))),
    ):
        error = dict(enumerate(errors)).get(int(index))
        report[name] = outcome(lambda error=error: restore_module.fail_together(failing(error)))
    with open(output, "w") as file:
        json.dump(report, file)
    gang.__exit__(None, None, None)


if __name__ == "__main__":
    main()
