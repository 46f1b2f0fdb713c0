"""Compiles the steps of a run's batch phases in a thread.

Compiling needs no arrays and reading arrays needs little CPU time, so the first step is compiled
while the state is restored or initialized, and a run waits only for the longer of the two. In a run
of one process SIGTERM ends the wait for a compilation, which may take minutes while a spot machine
has 30 seconds. XLA compilation itself cannot be cancelled, so a process that exits normally still
waits for it; killing the process instead loses nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import jax

from training.config.batch_schedule import BatchPhase
from training.config.job import TrainJob
from training.cost.executed_flops import executed_flops
from training.fault.preemption import StopSignal
from training.metrics.throughput import Throughput
from training.step.program import Program

_POLL_SECONDS = 0.2
_STEP = "jit_train_step-"  # beginning of the step's key in JAX's compilation cache


@dataclass(frozen=True)
class CompiledPhase:
    """A batch phase's compiled step, for its batch shape only, and the throughput of its steps."""

    step: jax.stages.Compiled
    throughput: Throughput


class PhaseCompiler:
    """Compiles the steps of batch phases one after the other. Close it after use.

    `found` has the keys of the programs that JAX's compilation cache had, and grows.
    """

    def __init__(
        self,
        job: TrainJob,
        batch_phases: Sequence[tuple[BatchPhase, Program]],
        found: Sequence[str] = (),
    ) -> None:
        self._job = job
        self._programs = dict(batch_phases)
        self._found = found
        self._thread = ThreadPoolExecutor(1, "compile")
        self._done = 0

    @property
    def loaded(self) -> int:
        """Steps that an earlier attempt had compiled."""
        return sum(key.startswith(_STEP) for key in self._found)

    @property
    def count(self) -> int:
        """Steps compiled so far."""
        return self._done - self.loaded

    def start(self, phase: BatchPhase) -> Future[CompiledPhase]:
        """Start to compile the step of a phase, after those that were started before."""
        return self._thread.submit(self._compile, phase)

    def start_likely(self) -> tuple[BatchPhase, Future[CompiledPhase]] | None:
        """Start with the phase of the newest checkpoint; None when only its content shows it."""
        job = self._job
        if not job.resume_from and job.start is not None and job.start.take == "everything":
            return None
        phase = self.phase_after(job.resume_from[-1][0] if job.resume_from else 0)
        return None if phase is None else (phase, self.start(phase))

    def phase_after(self, step: int) -> BatchPhase | None:
        """The phase of the step after `step`; None after the last."""
        return next((phase for phase in self._programs if phase.end > step), None)

    def result(self, compiling: Future[CompiledPhase], stop: StopSignal) -> CompiledPhase | None:
        """Wait for a compilation; None when SIGTERM came before its end."""
        while not wait([compiling], timeout=_POLL_SECONDS).done:
            if stop.alone:
                return None
        return compiling.result()

    def close(self) -> None:
        """Start no more compilations; does not wait for one in flight."""
        self._thread.shutdown(wait=False)

    def _compile(self, phase: BatchPhase) -> CompiledPhase:
        program = self._programs[phase]
        traced = program.step.trace(program.abstract, program.abstract_batch())
        throughput = self._throughput(program)
        compiled = traced.lower().compile()
        self._done += 1
        return CompiledPhase(compiled, throughput)

    def _throughput(self, program: Program) -> Throughput:
        layout, train, job = program.layout, program.train, self._job
        kind = layout.mesh.devices.flat[0].device_kind
        shape = (job.model, train.batch_size, train.sequence_length, kind, layout.devices)
        executed = executed_flops(job.model, job.optimizer, train, program.backend, layout.devices)
        return dataclasses.replace(Throughput.of(*shape), executed=executed)
