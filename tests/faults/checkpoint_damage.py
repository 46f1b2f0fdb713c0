"""Fault 17, checkpoints: files that are missing, cut, changed or in each other's places.

Two sound checkpoints of one run, of steps 1 and 2, are damaged in one way and restored: what comes
back has the bits that were saved, or there is `CorruptOutput`; a run resumes from
whichever of the two is sound, and from no third thing. On a local disk, and in a bucket.
"""

from __future__ import annotations

import dataclasses
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pipeline.errors import CorruptOutput
from tests.faults.fake_gcs import FakeGCS
from tests.faults.registry import Fault, trials
from tests.training import tiny
from training.checkpoint.checkpointer import Checkpointer
from training.checkpoint.restore import newest_sound, read_progress

KINDS = ("delete", "empty", "truncate", "flip", "swap", "zero 4 KiB", "duplicate", "extra")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """What is saved: a step, and arrays of several sizes, dtypes and numbers of chunks."""

    step: Any
    arrays: dict[str, Any]


def state(step: int) -> State:
    """Random values, other ones at every step."""
    numbers = np.random.default_rng(step)
    values = {
        "large": numbers.standard_normal((64, 96, 8)).astype(np.float32),
        "moment": numbers.standard_normal((64, 96, 8)).astype(np.float32),
        "middle": numbers.standard_normal((50, 40)).astype(np.float32),
        "counts": numbers.integers(0, 1000, 300).astype(np.int32),
        "norm": numbers.standard_normal(32).astype(np.float32),
    }
    return jax.tree.map(jax.numpy.asarray, State(np.int32(step), values))


def save(directory: str) -> list[tuple[int, str]]:
    """Both checkpoints; the large arrays in several chunks."""
    checkpointer = Checkpointer(directory, attempt="a", chunk_bytes=1 << 14)
    paths = [(s, checkpointer.save(s, state(s), {"rows": [{"step": s}]})) for s in (1, 2)]
    checkpointer.wait()
    return paths


def damage(
    kind: str, files: dict[str, bytes], first: str, second: str, numbers: random.Random
) -> dict[str, bytes | None]:
    """What one kind of damage to the checkpoint under `first` writes; None is deleted.

    `files` are those of both checkpoints; their names begin with `first` or with `second`.
    """
    names = sorted(name for name in files if name.startswith(first))
    name = numbers.choice(names)
    content = bytearray(files[name])
    begin = numbers.randrange(len(content))
    if kind == "delete":
        return {name: None}
    if kind == "empty":
        return {name: b""}
    if kind == "extra":
        extra = numbers.choice(["x", "arrays/norm/c.1", "arrays/other/zarr.json", "index.json.1"])
        return {first + extra: numbers.randbytes(numbers.randrange(5000))}
    if kind == "swap":
        other = numbers.choice(names)
        if numbers.random() < 0.5:  # the same file of the other checkpoint
            other = second + name.removeprefix(first)
        return {name: files[other], other: files[name]}
    if kind == "truncate":
        del content[begin:]
    elif kind == "flip":
        for _ in range(numbers.choice([1, 1, 2, 5])):
            content[numbers.randrange(len(content))] ^= 1 << numbers.randrange(8)
    elif kind == "zero 4 KiB":
        size = min(4096, len(content) - begin)
        content[begin : begin + size] = bytes(size)
    else:
        part = content[begin : begin + numbers.choice([1, 4, 512, 4096])]
        if numbers.random() < 0.5:
            content[begin:begin] = part  # what follows moves on
        else:
            content[begin + len(part) : begin + 2 * len(part)] = part
    return {name: bytes(content)}


def check(paths: list[tuple[int, str]], seen: Counter[str]) -> None:
    """Each checkpoint alone, then both: right bits, or `CorruptOutput`."""
    sound = [step for step, path in paths if _is_right_or_damaged(step, path)]
    for step, _ in paths:
        seen["refused"] += step not in sound
    try:
        found = newest_sound(paths, tiny.like(state(0)))
    except CorruptOutput:
        assert not sound, f"steps {sound} are sound, and the run does not go on"
        return
    assert found is not None
    assert found[0] == max(sound), f"resumed from step {found[0]}, sound are {sound}"
    assert tiny.equal(found[2], state(found[0])), "a wrong value was used"


def _is_right_or_damaged(step: int, path: str) -> bool:
    try:
        found = newest_sound([(step, path)], tiny.like(state(0)))
    except CorruptOutput:
        return False
    assert found is not None
    assert tiny.equal(found[2], state(step)), "a wrong value was used"
    assert read_progress(path) == {"rows": [{"step": step}]}
    return True


Put = Callable[[dict[str, bytes | None]], None]


def _trials(
    seed: int, count: int, paths: list[tuple[int, str]], sound: dict[str, bytes], put: Put
) -> dict[str, Any]:
    figures: Counter[str] = Counter()

    def trial(number: int) -> None:
        numbers, kind = random.Random(number), KINDS[number % len(KINDS)]
        both = [f"{path.rpartition('/')[2]}/" for _, path in paths]
        if numbers.random() < 0.5:
            both.reverse()
        done = damage(kind, sound, *both, numbers)
        seen: Counter[str] = Counter()
        try:
            put(done)
            check(paths, seen)
        finally:
            put({name: sound.get(name) for name in done})
        changed = any(sound.get(name) != data for name, data in done.items() if name in sound)
        assert bool(seen["refused"]) == changed, f"{kind}: changed {changed}, refused {seen}"
        figures.update(seen)
        figures["noticed"] += changed
        figures["harmless"] += not changed

    return {"trials": trials(seed, count, trial), **figures}


def on_a_disk(seed: int, count: int, workspace: Path) -> dict[str, Any]:
    paths = save(str(workspace / "run"))
    root = workspace / "run"
    sound = {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}

    def put(changes: dict[str, bytes | None]) -> None:
        for name, content in changes.items():
            if content is None:
                (root / name).unlink(missing_ok=True)
            else:
                (root / name).parent.mkdir(exist_ok=True)
                (root / name).write_bytes(content)

    try:
        return _trials(seed, count, paths, sound, put)
    finally:
        shutil.rmtree(root)


def in_a_bucket(seed: int, count: int, workspace: Path) -> dict[str, Any]:
    del workspace
    with FakeGCS() as server:
        paths = save("gs://bucket/run")
        objects = server.buckets["bucket"]
        sound = {name.removeprefix("run/"): o.data for name, o in objects.items()}

        def put(changes: dict[str, bytes | None]) -> None:
            for name, content in changes.items():
                if content is None:
                    objects.pop(f"run/{name}", None)
                else:
                    server.put("bucket", f"run/{name}", content, {}, {})

        return _trials(seed, count, paths, sound, put)


FAULTS = {
    17: [
        Fault("damaged checkpoint, on a local disk", 16, 400, on_a_disk),
        Fault("damaged checkpoint, in a bucket", 8, 200, in_a_bucket),
    ]
}
