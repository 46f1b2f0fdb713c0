"""The speed of the last training on this machine, to predict that of the next."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

from models.shape.footprint import training_flops_per_token
from pipeline.errors import CorruptOutput
from pipeline.graph.facts import Published, Results
from pipeline.store import manifest, storage
from steps.artifacts import Checkpoint
from training.config.batch_schedule import rows_read

_STEPS = ("train-", "extend-", "warm_start-")
_MOST = 8  # outputs that are looked into, the newest first


def speed_here(results: Results, devices: int) -> tuple[float, str] | None:
    """FLOP/s on this machine's CPUs and the output that they were measured in.

    The FLOPs are of all steps of its attempts, with causal attention; their time is that between
    the first step and the last without evaluations and saves. None where no training on this
    machine with so many devices is in the store, or the store is not on a disk.
    """
    for run in _newest(results):
        train, flops, seconds = run.train, 0.0, 0.0
        length = train.sequence_length
        for attempt in run.attempts:
            if attempt.devices == devices and attempt.first_step is not None:
                last, first = (rows_read(train, n) for n in (attempt.last_step, attempt.first_step))
                tokens = (last - first) * length
                flops += tokens * training_flops_per_token(run.model, length, causal=True)
                seconds += attempt.buckets.get("step", 0.0)
        if flops and seconds:
            return flops / seconds, run.path.rpartition("/")[2]
    return None


def _newest(results: Results) -> Iterator[Checkpoint]:
    """Trainings in a local store that this machine did on its CPUs, the newest first."""
    prefix = results.prefix if isinstance(results, Published) else ""
    if not prefix or not storage.is_local(prefix):
        return
    found = []
    for name in storage.list_names(prefix):
        if name.startswith(_STEPS):
            with contextlib.suppress(OSError):
                path = storage.join(prefix, name)
                written = os.stat(storage.local_path(storage.join(path, manifest.NAME))).st_mtime
                found.append((written, path))
    for _, path in sorted(found, reverse=True)[:_MOST]:
        with contextlib.suppress(CorruptOutput):
            made = manifest.load(path)
            if made is None or made.provenance.get("host") != socket.gethostname():
                continue
            if "cpu" in made.result.get("measured", {}).get("devices", ""):
                yield Checkpoint(path, made)
