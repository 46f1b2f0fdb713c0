"""The beginning of a run: its state is made or read while its first step is compiled.

Compiling needs no arrays and reading them needs little of the processor, so the longer of the two
is what a run waits for. SIGTERM meanwhile ends both: a compilation may take minutes, and a spot
machine has 30 seconds. XLA cannot be broken off, though: a process that ends by itself after that
waits for the compilation, and when it is killed instead nothing is lost.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from training.beginning import Beginning, OnDamage, begin
from training.clock import Stopwatch
from training.executed import executed_flops
from training.job import TrainJob
from training.metrics import Throughput
from training.preemption import StopSignal
from training.program import Program
from training.stages import Stage
from training.watchdog import Watchdog

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.2


@dataclass(frozen=True)
class CompiledStage:
    """A stage's step, which takes arrays of its shapes only, and what its steps cost."""

    step: Any
    throughput: Throughput


class StageCompiler:
    """Compiles the steps of stages.

    Args:
        job: the run.
        stages: all of the run's, with their programs.

    Attributes:
        count: compilations so far.
    """

    def __init__(self, job: TrainJob, stages: Sequence[tuple[Stage, Program]]) -> None:
        self._job = job
        self._programs = dict(stages)
        self.count = 0

    def __call__(self, stage: Stage) -> CompiledStage:
        """Compile one; any thread."""
        self.count += 1
        program = self._programs[stage]
        traced = program.step.trace(program.abstract, *program.abstract_batch())
        throughput = self._throughput(program, traced)
        return CompiledStage(traced.lower().compile(), throughput)

    def _throughput(self, program: Program, traced: Any) -> Throughput:
        layout, train = program.layout, program.train
        kind = layout.mesh.devices.flat[0].device_kind
        shape = (self._job.model, train.batch_size, train.sequence_length, kind, layout.devices)
        found = Throughput.of(*shape)
        if found.peak is None:  # nothing to compare them with
            return found
        length = train.sequence_length
        executed, why = executed_flops(traced.jaxpr, self._job.model, length, layout.devices)
        logger.info("%s", why)
        return Throughput.of(*shape, executed)


def open_run(
    job: TrainJob,
    program: Program,
    stages: Sequence[tuple[Stage, Program]],
    compiler: StageCompiler,
    *,
    watch: Stopwatch,
    watchdog: Watchdog,
    stop: StopSignal,
    on_damage: OnDamage,
) -> tuple[Beginning, CompiledStage | None]:
    """Where the run begins, and the compiled step of that place.

    The second is None where there is no step to do, or SIGTERM came while it was compiled.

    Raises:
        CorruptOutput, InputError: see `training.beginning.begin`.
    """
    thread = ThreadPoolExecutor(1, "compile")
    try:
        early = _likely_stage(job, stages)
        compiling = thread.submit(compiler, early) if early is not None else None
        with watchdog.phase("restore or init"):
            start = begin(job, program, on_damage)
        stage = next((stage for stage, _ in stages if stage.end > start.step), None)
        if stage is None:
            return start, None
        if compiling is None or stage is not early:
            compiling = thread.submit(compiler, stage)
        with watchdog.phase("compile"), watch.during("compile"):
            return start, _unless_stopped(compiling, stop)
    finally:
        thread.shutdown(wait=False)


def compile_later(compiler: StageCompiler, stage: Stage, stop: StopSignal) -> CompiledStage | None:
    """The compiled step of a later stage; None where SIGTERM came while it was compiled."""
    thread = ThreadPoolExecutor(1, "compile")
    try:
        return _unless_stopped(thread.submit(compiler, stage), stop)
    finally:
        thread.shutdown(wait=False)


def _likely_stage(job: TrainJob, stages: Sequence[tuple[Stage, Program]]) -> Stage | None:
    """The stage that the newest checkpoint is in; None where only reading it will tell."""
    if not job.resume_from and job.start is not None and job.start.take == "everything":
        return None
    likely = job.resume_from[-1][0] if job.resume_from else 0
    return next((stage for stage, _ in stages if stage.end > likely), None)


def _unless_stopped(compiling: Future[Any], stop: StopSignal) -> CompiledStage | None:
    while not wait([compiling], timeout=_LOOK_SECONDS).done:
        if stop.alone:
            return None
    return compiling.result()
