"""What the finished trainings of a store say about predicted step times on the same hardware.

A chip's runs count for that chip, in any number; a CPU's for CPUs of the same model and number of
cores. They are predicted anew, so a newer table of `training.cost.step_time` keeps what an older
one's runs measured.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from models.shape.config import TransformerConfig
from models.shape.validation import from_plain
from pipeline.accelerators import GPUS, TPUS, Chip
from pipeline.errors import PonenteError
from pipeline.identity.fingerprint import plain
from steps.artifacts import Checkpoint
from steps.checkpoints.finished import NOT_OURS, manifest_of, trainings
from steps.training.plan.cost import ends
from training.config import OptimizerConfig, TrainConfig
from training.cost import host_cpu, step_time
from training.cost.learned import (
    Correction,
    Measurement,
    correction,
    measurements,
    place_of,
    spread_of,
)
from training.cost.memory_plan import Devices
from training.cost.resolved_run import ResolvedPhase, resolve_run
from training.cost.step_time import Forecast, forecast
from training.cost.step_work import HOST_CHIPS

STEP = "step"
"""Field of a training's `measured`, see `steps.training.measured_step`."""
Said = tuple[Measurement, ...]
"""What a finished training says of steps, and of the kinds of work in its profile."""
_LEAST_STEPS = 5  # a shorter run has little but the slow first steps


@dataclass(frozen=True)
class Hardware:
    """Devices whose times are comparable; the processor and the cores are those of CPUs."""

    chip: str
    processor: str = ""
    cores: int = 0

    @staticmethod
    def of(chip: str) -> Hardware:
        """A chip by name, or this machine's CPU."""
        here = {"processor": host_cpu.processor(), "cores": host_cpu.cores()}
        return Hardware(step_time.CPU, **here) if chip in ("", step_time.CPU) else Hardware(chip)

    @property
    def words(self) -> str:
        return "this CPU" if self.processor else self.chip

    def device(self, count: int) -> Chip:
        """One of `count` devices; `KeyError` for a chip without a row in the table."""
        return step_time.cpu(count, self.cores) if self.processor else {**TPUS, **GPUS}[self.chip]


@dataclass(frozen=True)
class Learned:
    """A prediction that runs corrected, `profiles` of them by part; `table` is the one without."""

    step: Forecast
    table: Forecast
    correction: Correction
    runs: int
    profiles: int
    hardware: Hardware

    @property
    def data(self) -> dict[str, Any]:
        """For `plan --json`."""
        seconds = ends(self.step)
        return {
            "step_seconds": list(seconds),
            "tokens_per_second": [self.step.tokens / each for each in reversed(seconds)],
            "shares": self.step.shares,
            "learned": {
                "factor": self.correction.factor,
                "runs": self.runs,
                "profiles": self.profiles,
                "interval": self.correction.narrowed,
                "step_seconds_without": list(ends(self.table)),
            },
        }

    @property
    def range(self) -> str:
        """The interval of the step's time, in words."""
        (fast, middle, slow), tokens = ends(self.step), self.step.tokens
        return (
            f"{fast:.3g} to {slow:.3g} s per step (middle {middle:.3g}), "
            f"{tokens / slow:,.0f} to {tokens / fast:,.0f} tokens/s"
        )

    def __str__(self) -> str:
        if not self.runs:
            return f"not corrected by runs on {self.hardware.words}"
        profiles = f", {self.profiles} of them with a profile" if self.profiles else ""
        by = f"{self.runs} run{'s' * (self.runs > 1)} on {self.hardware.words}"
        return f"step time x{self.correction.factor:.3g} by {by} in this store{profiles}"


def predicted(run: ResolvedPhase, hardware: Hardware, store: str, own: str = "") -> Learned:
    """The prediction of a step, corrected by the runs of a store, if any, but that in `own`.

    `KeyError` for a chip without a row in the table.
    """
    return corrected(run, hardware, measured_on(hardware, store, own))


def measured_on(hardware: Hardware, store: str, own: str = "") -> list[Said]:
    """What each run of a store, if any, but that in `own` says of steps on some hardware."""
    found = []
    # A store that cannot be read says nothing; a plan and a training do not need it.
    with contextlib.suppress(PonenteError, OSError):
        for each in trainings(store) if store else ():
            if each.path != own and (said := _said(each.path, hardware)):
                found.append(said)
    return found


def corrected(run: ResolvedPhase, hardware: Hardware, found: Sequence[Said]) -> Learned:
    """The prediction of a step, corrected by what runs say."""
    step = forecast(run, chip := hardware.device(run.devices.count))
    every = [one for said in found for one in said]
    made = correction(step.shares, place_of(run), every, spread_of(chip.name))
    profiles = sum(len(said) > 1 for said in found)
    return Learned(made.applied(step), step, made, len(found), profiles, hardware)


def phase_of(run: Checkpoint) -> ResolvedPhase:
    """The largest batch phase of a finished training on the devices of its record."""
    fields = plain(run.manifest.config)["optimizer"]
    recorded = run.result["measured"][STEP]["hardware"]
    return resolved(run.model, from_plain(OptimizerConfig, fields), run.train, recorded)


def resolved(
    model: TransformerConfig,
    optimizer: OptimizerConfig,
    train: TrainConfig,
    hardware: Mapping[str, Any],
) -> ResolvedPhase:
    """The largest batch phase of a training on `TrainResult.hardware`."""
    names = [field.name for field in dataclasses.fields(Devices)]
    recorded: dict[str, Any] = {
        "per_host": HOST_CHIPS,
        **hardware,
    }  # earlier versions did not record it
    devices = Devices(**{name: recorded[name] for name in names})
    return resolve_run(model, optimizer, train, devices).largest


def hardware_of(recorded: Mapping[str, Any]) -> Hardware:
    """The hardware of a `TrainResult.hardware`."""
    if recorded["platform"] == "cpu":
        return Hardware(step_time.CPU, recorded["processor"], recorded["cores"])
    return Hardware(recorded["chip"] or "?")


# Finished outputs do not change; a plan asks for each of its trainings.
@functools.lru_cache(1024)
def _said(path: str, hardware: Hardware) -> Said:
    """What a finished training says of steps on this hardware."""
    with contextlib.suppress(*NOT_OURS):  # of a version without the record, or with other fields
        made = manifest_of(path)
        assert made is not None
        run, record = Checkpoint(path, made), made.result["measured"][STEP]
        if hardware_of(record["hardware"]) != hardware:
            return ()
        phase = phase_of(run)
        chip = hardware.device(phase.devices.count)
        if 0 < record["seconds"] < math.inf and record["steps"] >= _LEAST_STEPS:
            # Operations wait for a CPU's cores: by their times plans were worse, not better.
            parts = {} if chip.name == step_time.CPU else record.get("parts", {})
            took = record["seconds"], parts, record["disturbed"]
            return tuple(measurements(forecast(phase, chip), phase, *took))
    return ()
