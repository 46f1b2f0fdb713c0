"""What a training's steps, saves and starts take: measured in the store where it has runs."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
from collections.abc import Iterator, Sequence
from statistics import fmean, quantiles
from typing import Any

from pipeline.accelerators import chip_of
from pipeline.errors import PonenteError
from pipeline.graph.facts import Results
from pipeline.graph.step import Node
from pipeline.store import manifest, storage
from pipeline.store.manifest import KEEP
from pipeline.store.shards import ATTEMPTS
from steps.artifacts import Checkpoint
from steps.checkpoints.finished import EVERY, NOT_OURS, manifest_of
from steps.training.plan.continued import store_of
from steps.training.plan.cost import Ends, checkpoint_bytes
from steps.training.plan.declared_run import DeclaredRun
from training.config.batch_schedule import batch_phases
from training.cost.memory_plan import Devices
from training.cost.preemption import Work
from training.metrics.goodput import AttemptTime, read_attempts

LEAST_STEPS = 20  # measured ones, below which a prediction of the step is better
_MOST = 8  # outputs that are looked into, the newest first
_BESIDE = ("init", "compile", "checkpoint", "other")  # buckets that are not of steps


def work_of(
    node: Node,
    run: DeclaredRun,
    results: Results,
    devices: Devices,
    predicted: Work | None = None,
    learned: Ends | None = None,
) -> tuple[Work | None, str]:
    """What is left of a training, and which of its times were measured in which outputs.

    `predicted` is None on CPUs, where a step takes the seconds `learned` from runs; None again
    without any. Starts and saves are those of trainings on as many devices of the
    kind; of this training's own earlier attempts in its last batch phase also the steps.
    """
    values, places = dict[str, Any](), dict[str, str]()
    for name, times in _found(node, run, results, devices, learned):
        for what in times.keys() - values.keys():
            values[what], places[what] = times[what], name
    for name, other in (("start", "restart"), ("restart", "start")):  # one stands for the other
        if other in values:
            values.setdefault(name, values[other])
    shown = {name: [w for w in sorted(places) if places[w] == name] for name in places.values()}
    sources = "; ".join(f"{', '.join(fields)} by {name}" for name, fields in shown.items())
    if predicted is not None:
        return dataclasses.replace(predicted, **values), sources
    if run.steps is None or not {"step", "start"} <= values.keys():
        return None, ""
    values.setdefault("save", 0.0)
    return Work(steps=run.steps - run.done, **values), sources


def _found(
    node: Node, run: DeclaredRun, results: Results, devices: Devices, learned: Ends | None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(directory, fields of `Work` that it shows), of this training, then of the newest ones."""
    if not (prefix := store_of(results).prefix):
        return
    above = storage.join(prefix, node.directory, ATTEMPTS)
    names = storage.list_names(above)
    own = _on(read_attempts(storage.join(above, n, KEEP) for n in names), devices)
    yield node.directory, fields(own, batch_phases(run.whole)[-1].first)
    for path in _newest(prefix):
        # Another training that cannot be read says nothing; a plan does not need it.
        with contextlib.suppress(*NOT_OURS, PonenteError, OSError):
            yield path.rpartition("/")[2], _beside(path, run, devices)
    if learned is not None:
        yield "runs of this store", {"step": learned}


def _newest(prefix: str) -> list[str]:
    """The finished outputs of trainings in a local store that are looked into, newest first."""
    found = []
    for name in storage.list_names(prefix) if storage.is_local(prefix) else ():
        path = storage.join(prefix, name)
        with contextlib.suppress(OSError):
            if name.startswith(EVERY):
                written = os.stat(storage.local_path(storage.join(path, manifest.NAME))).st_mtime
                found.append((written, path))
    return [path for _, path in sorted(found, reverse=True)[:_MOST]]


def _beside(path: str, run: DeclaredRun, devices: Devices) -> dict[str, Any]:
    """The fields of `Work` that another training shows, if it ran on such devices.

    On CPUs, if it ran on this machine. Raises as reading a damaged output does.
    """
    made, chip = manifest_of(path), devices.chip
    if made is None:
        return {}
    kind = made.result.get("measured", {}).get("devices", "").partition(" x ")[2]
    here = chip or made.provenance.get("host") == socket.gethostname()
    if not (here and _is(kind, chip)):
        return {}
    attempts = _on(Checkpoint(path, made).attempts, devices)
    size = made.shard(made.result["checkpoint"]).bytes
    return {**_startup(attempts), **_saves(attempts, checkpoint_bytes(run) / size)}


def fields(attempts: Sequence[AttemptTime], since: int = 0) -> dict[str, Any]:
    """The fields of `Work` that attempts at one training show, whose batches are alike `since`.

    An attempt that began with other batches says nothing of the steps that are left.
    """
    alike = [each for each in attempts if (each.first_step or 0) >= since]
    return {**_startup(attempts), **_saves(attempts, 1.0), **_steps(alike)}


def _on(attempts: Sequence[AttemptTime], devices: Devices) -> list[AttemptTime]:
    count, chip = devices.count, devices.chip
    return [each for each in attempts if each.devices == count and _is(each.device, chip)]


def _is(kind: str, name: str) -> bool:
    """Whether JAX's name of a device is that of a chip; of a CPU for ""."""
    if not name:
        return kind == "cpu"
    chip = chip_of(kind)
    return chip is not None and chip.name == name


def _startup(attempts: Sequence[AttemptTime]) -> dict[str, Any]:
    found = {}
    for name, resumed in (("start", False), ("restart", True)):
        parts = [a.startup for a in attempts if bool(a.first_step) == resumed]
        begun = [sum(each.values()) - each["first step"] for each in parts if "first step" in each]
        found |= {name: fmean(begun)} if begun else {}
    return found


def _saves(attempts: Sequence[AttemptTime], scale: float) -> dict[str, Any]:
    """The seconds of a save, which grow with the checkpoint's size by `scale`."""
    count = sum(len(each.marks) for each in attempts)
    spent = sum(each.buckets.get("checkpoint", 0.0) for each in attempts)
    return {"save": scale * spent / count} if count else {}


def _steps(attempts: Sequence[AttemptTime]) -> dict[str, Any]:
    """The seconds of a step with what is between steps, such as evaluations."""
    done, spent = [], []
    for each in attempts:
        if each.first_step is not None and each.last_step > each.first_step:
            done.append(each.last_step - each.first_step)
            rest = sum(s for bucket, s in each.buckets.items() if bucket not in _BESIDE)
            spent.append(rest - each.startup.get("evaluation", 0.0))
    if sum(done) < LEAST_STEPS:
        return {}
    middle = sum(spent) / sum(done)
    rates = [seconds / count for seconds, count in zip(spent, done, strict=True)]
    ends = quantiles(rates, n=10, method="inclusive") if len(rates) > 2 else [middle]
    return {"step": (min(ends[0], middle), middle, max(ends[-1], middle))}
