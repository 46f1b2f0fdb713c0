"""The record of a finished training's step: what was predicted beside what was measured.

It is the field "step" of the result's `measured`, which no key and no digest contains:

    hardware         `TrainResult.hardware`
    seconds, steps   median time of a step of the largest batch phase without waits for data, over
                     so many steps of the last attempt
    disturbed        deviation of the logarithm of their times, by the 10th and 90th percentile
    waiting          share of those steps' time in which the devices waited for data
    parts            seconds of a step by kind of work, where steps were profiled
    memory_bytes     peak of the fullest device; not of CPUs
    compile_seconds, save_seconds    what the loop waited for the compilation, and for each save
                     of the attempts on as many of these devices
    predicted        the same by a plan just before: `seconds` as low, middle, high; `table_seconds`
                     without the store's runs, `factor` by these `runs`; `times` by kind of work
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from models.shape.config import TransformerConfig
from pipeline import InputError, StepContext
from pipeline.accelerators import TPUS
from pipeline.store import storage
from steps.training.plan import experience
from steps.training.plan.cost import SAVE_BYTES, checkpoint_bytes, ends
from training.config import OptimizerConfig, TrainConfig
from training.cost.resolved_run import ResolvedPhase
from training.metrics.profile_parts import PARTS, TRACES

_TENTHS = 2 * 1.2816  # deviations of a normal distribution between its first and last tenth

if TYPE_CHECKING:
    from training.metrics.goodput import AttemptTime


def measured_step(
    run: StepContext,
    settings: tuple[TransformerConfig, OptimizerConfig, TrainConfig],
    trained: Mapping[str, Any],
    attempts: Sequence[AttemptTime],
) -> dict[str, Any]:
    """{"step": the record} of a training, from the fields of its `TrainResult`.

    Empty where its last attempt did no step of the largest batch phase, and where an earlier phase,
    done on other devices, cannot run on those of the last attempt.
    """
    from training.metrics.metrics_log import read_history

    hardware, last = trained["hardware"], attempts[-1]
    try:
        phase = experience.resolved(*settings, hardware)
    except InputError:  # `experience.phase_of`, which reads the record, could not resolve it either
        return {}
    first = max(phase.phase.first, last.first_step or 0)
    rows = read_history(trained["history"], ["step"])
    counted = [row for row in rows if first < row["step"] <= phase.phase.end]
    if not counted:
        return {}
    spent, waited = (math.fsum(row[name] for row in counted) for name in ("seconds", "data_wait"))
    times = sorted(row["seconds"] - row["data_wait"] for row in counted)
    tenth = len(times) // 10
    low, high = (max(each, 1e-9) for each in (times[tenth], times[-1 - tenth]))
    found: dict[str, Any] = {
        "hardware": dict(hardware),
        "seconds": statistics.median(times),
        "steps": len(counted),
        "disturbed": math.log(high / low) / _TENTHS,
        "waiting": waited / spent if spent else 0.0,
        "compile_seconds": last.buckets.get("compile", 0.0),
    }
    alike = [each for each in attempts if _devices(each) == _devices(last)]
    if saves := sum(len(each.marks) for each in alike):
        found["save_seconds"] = sum(each.buckets["checkpoint"] for each in alike) / saves
    peaks = [row["memory_bytes"] for row in counted if "memory_bytes" in row]
    if peaks and hardware["platform"] != "cpu":  # whose rows have the whole process's memory
        found["memory_bytes"] = max(peaks)
    if parts := _parts(run.keep):
        found["parts"] = parts
    return {experience.STEP: found | {"predicted": _predicted(phase, hardware, run.root)}}


def _devices(attempt: AttemptTime) -> tuple[str, int]:
    return attempt.device, attempt.devices


def _parts(keep: str) -> dict[str, float]:
    """Seconds by kind of the last profile."""
    above = storage.join(keep, TRACES)
    for name in reversed(storage.list_names(above)):
        with contextlib.suppress(FileNotFoundError, ValueError):
            return storage.read_json(storage.join(above, name, PARTS))
    return {}


def _predicted(phase: ResolvedPhase, hardware: Mapping[str, Any], root: str) -> dict[str, Any]:
    found: dict[str, Any] = {"memory_bytes": int(phase.estimate.total)}
    if hardware["platform"] != "cpu":
        tpu = TPUS.get(phase.devices.chip)
        chips = phase.devices.count / (tpu.devices if tpu else 1)
        found["save_seconds"] = checkpoint_bytes(phase) / chips / SAVE_BYTES
    with contextlib.suppress(KeyError):  # a chip without a row
        where = experience.hardware_of(hardware)
        learned = experience.predicted(phase, where, root.rpartition("/")[0], root)
        found |= {
            "seconds": list(ends(learned.step)),
            "table_seconds": learned.table.seconds,
            "factor": learned.correction.factor,
            "runs": learned.runs,
            "times": learned.step.times,
        }
    return found
