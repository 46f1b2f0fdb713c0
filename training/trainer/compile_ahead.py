"""Compiles or loads a run's first step while its state is restored or initialized.

Compiling needs no arrays and reading arrays needs little CPU time, so a run waits only for the
longer of the two. In a run of one process SIGTERM ends the wait for a compilation, which may take
minutes while a spot machine has 30 seconds. XLA compilation itself cannot be cancelled, so a
process that exits normally still waits for it; killing the process instead loses nothing.
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

_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class CompiledPhase:
    """A batch phase's compiled step, for its batch shape only, and the throughput of its steps."""

    step: Any
    throughput: Throughput


class PhaseCompiler:
    """Compiles the steps of batch phases, or loads them.

    Args:
        job: the run.
        batch_phases: all phases of the run with their programs.
        kept: the steps that earlier attempts compiled.

    Attributes:
        count: steps compiled so far; loaded steps are not counted.
        loaded: steps loaded so far.
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
        """Compile or load the step of one phase; may be called in any thread."""
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
        if found.peak is None:  # without a peak there is no utilization to compute
            return found
        length = train.sequence_length
        executed, reason = executed_flops(traced.jaxpr, self._job.model, length, layout.devices)
        logger.info("%s", reason)
        return Throughput.of(*shape, executed)


def restore_and_compile(
    job: TrainJob,
    program: Program,
    batch_phases: Sequence[tuple[BatchPhase, Program]],
    compiler: PhaseCompiler,
    run: RunContext,
) -> tuple[InitialState, CompiledPhase | None]:
    """The state a run begins with, and the compiled step of its batch phase.

    The second is None when no step is left to do, or when SIGTERM came during compilation.

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
            compiled = _result_or_stop(compiling, run.stop)
        run.startup.ended("compiling")
        return start, compiled
    finally:
        thread.shutdown(wait=False)


def compile_phase(
    compiler: PhaseCompiler, phase: BatchPhase, stop: StopSignal
) -> CompiledPhase | None:
    """The compiled step of a later phase; None when SIGTERM came during compilation."""
    thread = ThreadPoolExecutor(1, "compile")
    try:
        return _result_or_stop(thread.submit(compiler, phase), stop)
    finally:
        thread.shutdown(wait=False)


def _likely_phase(
    job: TrainJob, batch_phases: Sequence[tuple[BatchPhase, Program]]
) -> BatchPhase | None:
    """The phase of the newest checkpoint; None when only reading the checkpoint shows it."""
    if not job.resume_from and job.start is not None and job.start.take == "everything":
        return None
    likely = job.resume_from[-1][0] if job.resume_from else 0
    return next((phase for phase, _ in batch_phases if phase.end > likely), None)


def _result_or_stop(compiling: Future[Any], stop: StopSignal) -> CompiledPhase | None:
    while not wait([compiling], timeout=_POLL_SECONDS).done:
        if stop.alone:
            return None
    return compiling.result()
