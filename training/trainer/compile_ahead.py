"""The beginning of a run: its state is made or read while its first step is compiled or loaded.

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

from training.config.batch_schedule import BatchPhase
from training.config.job import TrainJob
from training.cost.executed_flops import executed_flops
from training.fault.preemption import StopSignal
from training.metrics.throughput import Throughput
from training.step.program import Program
from training.trainer.initial_state import InitialState, restore_or_init
from training.trainer.kept_program import KeptPrograms
from training.trainer.run_context import RunContext

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.2


@dataclass(frozen=True)
class CompiledPhase:
    """A batch phase's step, which takes arrays of its shapes only, and what its steps cost."""

    step: Any
    throughput: Throughput


class PhaseCompiler:
    """Compiles the steps of batch phases, or loads them.

    Args:
        job: the run.
        batch_phases: all of the run's, with their programs.
        kept: what earlier attempts compiled.

    Attributes:
        count: compilations so far, those not counted that were loaded.
        loaded: steps that were loaded.
    """

    def __init__(
        self,
        job: TrainJob,
        batch_phases: Sequence[tuple[BatchPhase, Program]],
        kept: KeptPrograms,
    ) -> None:
        self._job = job
        self._programs = dict(batch_phases)
        self._kept = kept
        self.count = self.loaded = 0

    def __call__(self, phase: BatchPhase) -> CompiledPhase:
        """Compile one; any thread."""
        program = self._programs[phase]
        traced = program.step.trace(program.abstract, program.abstract_batch())
        throughput = self._throughput(program, traced)
        compiled, loaded = self._kept.compile(program, traced.lower())
        self.loaded += loaded
        self.count += not loaded
        return CompiledPhase(compiled, throughput)

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


def restore_and_compile(
    job: TrainJob,
    program: Program,
    batch_phases: Sequence[tuple[BatchPhase, Program]],
    compiler: PhaseCompiler,
    run: RunContext,
) -> tuple[InitialState, CompiledPhase | None]:
    """Where the run begins, and the compiled step of that place.

    The second is None where there is no step to do, or SIGTERM came while it was compiled.

    Raises:
        CorruptOutput, InputError: see `training.trainer.initial_state.restore_or_init`.
    """
    thread = ThreadPoolExecutor(1, "compile")
    try:
        early = _likely_phase(job, batch_phases)
        compiling = thread.submit(compiler, early) if early is not None else None
        with run.watchdog.phase("restore or init"):
            start = restore_or_init(job, program, run)
        run.startup.ended("restoring")
        phase = next((phase for phase, _ in batch_phases if phase.end > start.step), None)
        if phase is None:
            return start, None
        if compiling is None or phase is not early:
            compiling = thread.submit(compiler, phase)
        with run.watchdog.phase("compile"), run.watch.during("compile"):
            compiled = _unless_stopped(compiling, run.stop)
        run.startup.ended("compiling")
        return start, compiled
    finally:
        thread.shutdown(wait=False)


def compile_phase(
    compiler: PhaseCompiler, phase: BatchPhase, stop: StopSignal
) -> CompiledPhase | None:
    """The compiled step of a later phase; None where SIGTERM came while it was compiled."""
    thread = ThreadPoolExecutor(1, "compile")
    try:
        return _unless_stopped(thread.submit(compiler, phase), stop)
    finally:
        thread.shutdown(wait=False)


def _likely_phase(
    job: TrainJob, batch_phases: Sequence[tuple[BatchPhase, Program]]
) -> BatchPhase | None:
    """The phase that the newest checkpoint is in; None where only reading it will tell."""
    if not job.resume_from and job.start is not None and job.start.take == "everything":
        return None
    likely = job.resume_from[-1][0] if job.resume_from else 0
    return next((phase for phase, _ in batch_phases if phase.end > likely), None)


def _unless_stopped(compiling: Future[Any], stop: StopSignal) -> CompiledPhase | None:
    while not wait([compiling], timeout=_LOOK_SECONDS).done:
        if stop.alone:
            return None
    return compiling.result()
