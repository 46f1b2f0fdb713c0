"""The training loop: reads batches, writes checkpoints and metrics rows.

The host does not wait for the newest step: it queues step k, then reads the metrics of step k-1.
Only evaluation, a checkpoint and the end of the run wait for the newest step. A resumed run reads
the same batches, computes the same losses and ends with the same parameters as an uninterrupted
run, bit for bit on the same devices.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import jax
from jax.stages import Compiled

from data.batches.dataset import Dataset
from data.batches.loader import Loader
from models.jax_numerics import fixed_numerics
from pipeline.errors import InputError, PonenteError
from training.checkpoint.checkpointer import Checkpointer
from training.config.batch_schedule import BatchPhase, dropped, due
from training.config.job import Listener, TrainJob, TrainResult, check_job
from training.cost.executed_flops import executed_flops
from training.cost.host_cpu import cores, processor
from training.evaluate.evaluator import InTrainingEvaluation
from training.metrics.early import EarlyLooks
from training.metrics.metrics_log import Segment, read_history, to_relative
from training.metrics.recorder import PeakMemory, Recorder, Throughput
from training.metrics.stopwatch import Stopwatch, TimedBatches
from training.optimizer import schedule
from training.step.program import Program, Programs, described
from training.step.state import TrainState
from training.trainer import cpu_memory
from training.trainer.compile_ahead import PhaseCompiler, cache_in
from training.trainer.initial_state import InitialState, data_offset, restore_or_init
from training.trainer.job_programs import programs_of
from training.trainer.run_context import RunContext, run_context

logger = logging.getLogger(__name__)


@fixed_numerics()
def train(
    job: TrainJob,
    listener: Listener | None = None,
    watch: Stopwatch | None = None,
    *,
    devices: Sequence[jax.Device] | None = None,
) -> TrainResult:
    """Train `job` to its last step, or until SIGTERM; every process of a gang calls it.

    Takes a listener, the attempt's stopwatch if that runs already, and devices other than all.

    Raises:
        InputError: the job is invalid, `max_skipped` steps in a row or all steps were not applied,
            or the loss of the first or of the last evaluation is not finite.
        CorruptOutput: every checkpoint to resume from is corrupt.
    """
    check_job(job)
    programs = programs_of(job, devices or jax.devices())
    layout = programs.largest.layout
    kind = layout.mesh.devices.flat[0].device_kind
    with (
        cache_in(job.compiled_directory) as found,
        cpu_memory.kept(layout.platform),
        run_context(job, listener, watch, device=kind, devices=layout.devices) as run,
        closing(PhaseCompiler(programs.phases, found)) as compiler,
    ):
        result = _Trainer(job, programs, compiler, run).go()
        run.end(preempted=result.preempted)
    return result


class _Trainer:
    """One attempt of a run: its loop, its checkpoints and its evaluations."""

    def __init__(
        self, job: TrainJob, programs: Programs, compiler: PhaseCompiler, run: RunContext
    ) -> None:
        program, self.refused = programs.largest, programs.refused
        self.config = job.train  # as given: a Program has the one whose "auto" is resolved
        self.job, self.program, self.batch_phases = job, program, programs.phases
        self.run, self.watch, self.compiler = run, run.watch, compiler
        self.history: Sequence[Segment] = ()
        self.looks: EarlyLooks | None = None
        if run.leader:
            for note in program.notes:
                logger.info("%s", note)
            if program.layout.platform != "cpu":
                logger.info("estimated memory of a device:\n%s", program.estimate.table())

    def go(self) -> TrainResult:
        """Initialize or resume, train, and wait for the last checkpoint."""
        start, compiled = self._restore_and_compile()
        self._record_start(start)
        self.recorder = Recorder(
            self.run.row,
            self.watch,
            None,
            self.config.max_skipped,
            updates=start.updates,
            memory=PeakMemory(jax.local_devices()),
        )
        self.checkpointer = Checkpointer(
            self.job.checkpoint_directory,
            self.run,
            attempt=self.job.attempt,
            dropped=functools.partial(dropped, train=self.config),
            existing=start.existing,
        )
        with ExitStack() as stack:
            stack.enter_context(self._last_save())
            steps, preempted = start.step, compiled is None and start.step < self.config.steps
            if not preempted:
                evaluator = InTrainingEvaluation(
                    self.job, self.program, self.watch, start.evaluated
                )
                self.evaluator = stack.enter_context(closing(evaluator))
                dataset = stack.enter_context(Dataset(self.job.data))
                steps, preempted = self._train(start, compiled, dataset)
            if preempted:
                self.run.event("preempted", step=steps)
        self.watch.switch("other")
        return self._result(steps, preempted)

    def _restore_and_compile(self) -> tuple[InitialState, Compiled | None]:
        """The state to begin with, and the compiled step of its batch phase.

        The second is None when no step is left to do, or when SIGTERM came during compilation.
        """
        run, job, compiler = self.run, self.job, self.compiler
        # Most likely the newest checkpoint is sound.
        likely = compiler.phase_after(job.resume_from[-1][0] if job.resume_from else job.least_done)
        compiling = None if likely is None else compiler.start(likely)
        with run.phase("restore or init", "init"):
            start = restore_or_init(job, self.program, run)
        self.watch.ended("restoring")
        phase = compiler.phase_after(start.step)
        if phase is None:
            return start, None
        if self.refused is not None and start.step < phase.first:
            raise self.refused
        if compiling is None or phase is not likely:
            compiling = compiler.start(phase)
        with run.phase("compile"):
            compiled = compiler.result(compiling, run.stop)
        self.watch.ended("compiling")
        return start, compiled

    def _record_start(self, start: InitialState) -> None:
        """Continue the metrics history from the checkpoint; report how the run starts."""
        self.history = start.history
        if self.run.log is not None:
            if start.copied:
                self.run.log.copy(start.history)
            else:
                self.run.log.resume(start.history)
        self.run.began(start.step, loaded=self.compiler.loaded > 0)
        # The forecast of a run that this one continues is of the end of that run.
        forecasts = iter(()) if self.job.start else read_history(start.history, ["forecast"])
        if self.job.forecast is not None and start.step == 0:
            self.run.event("forecast", step=0, **self.job.forecast)
            forecasts = iter([self.job.forecast])
        if self.run.log is not None:
            self.looks = EarlyLooks(self.run.log, forecasts, self.config.steps)
        if start.event is not None:
            self.run.event(start.event[0], **start.event[1])
        if self.run.leader:
            if start.copied:
                self._compare_rates(start)
            for step, path in start.corrupt:
                self.run.drop(step, path)

    def _compare_rates(self, start: InitialState) -> None:
        """Tell when this run's schedule has another rate for the last step of the run before."""
        (last,) = deque(read_history(start.history, ["step"]), maxlen=1)
        rate = float(schedule(self.job.optimizer, self.config.steps)(start.step - 1))
        before = last["learning_rate"]
        if not math.isclose(before, rate, rel_tol=0.01):
            self.run.event(
                "learning_rate",
                reason=f"step {start.step:,} was done at the learning rate {before:.3g}; the "
                f"schedule of this run has {rate:.3g} for it and continues from there",
            )

    @contextmanager
    def _last_save(self) -> Iterator[None]:
        """Wait for the last checkpoint; an error that is already propagating takes precedence."""
        done = False
        try:
            yield
            done = True
        finally:
            try:
                with self.run.phase("checkpoint"):
                    self.checkpointer.wait()
            except PonenteError as error:
                if done:
                    raise
                logger.error("%s", error)

    def _train(
        self, start: InitialState, compiled: Compiled | None, dataset: Dataset
    ) -> tuple[int, bool]:
        """Train the remaining batch phases; return the steps done and whether it was preempted."""
        state, step = start.state, start.step
        if step < self.config.steps:
            self.checkpointer.reserve(state)
        # New parameters, or the last attempt was stopped before it evaluated.
        if self.evaluator.should_evaluate(step):
            if not self._evaluate(step, state):
                return step, True
            self.watch.ended("evaluation")
            if step == self.config.steps:
                self._save(step, state)
        for phase, program in self.batch_phases:
            if phase.end <= step:
                continue
            # A batch of another shape has its own compiled step.
            if compiled is None:
                with self._pause("compile"):
                    compiled = self.compiler.result(self.compiler.start(phase), self.run.stop)
            if compiled is None:
                if self.checkpointer.begun != step:
                    self._save(step, state)
                break
            state, step, stopped = self._train_phase(state, step, phase, program, compiled, dataset)
            compiled = None
            if stopped:
                break
        return step, step < self.config.steps or self.evaluator.should_evaluate(step)

    def _train_phase(
        self,
        state: TrainState,
        start: int,
        phase: BatchPhase,
        program: Program,
        compiled: Compiled,
        dataset: Dataset,
    ) -> tuple[TrainState, int, bool]:
        """Train to the end of a batch phase; return whether a stop was requested before."""
        config, layout, run = self.config, program.layout, self.run
        batch_size = program.train.batch_size
        rows = layout.process_rows(batch_size)
        self.recorder.throughput = self._throughput(program)
        if run.profiler is not None:
            run.profiler.program = lambda: compiled.as_text() or ""
        loader = Loader(
            dataset,
            batch_size=phase.rows,
            rows=phase.read_rows(rows),
            start_batch=start - phase.first,
            stop_batch=phase.end - phase.first,
            first=phase.data_offset,
        )
        with loader:
            feed = TimedBatches(iter(loader), self.watch, waiting=run.watchdog.waiting)
            step, stopping = start, False
            self.watch.switch("step")
            for step, batch in zip(range(start + 1, phase.end + 1), feed, strict=False):
                self.watch.ended("first batch")
                if run.profiler is not None and run.profiler.due(step):
                    with self._pause("profile", "other"):  # writing a trace may take minutes
                        run.profiler.before(step)

                # Queue this step on the devices. The host goes on at once, and reads the metrics
                # of the step before while this one runs.
                tokens = layout.place(phase.cut(batch, rows), batch_size)
                state, metrics = compiled(state, tokens)
                feed.set_inflight(metrics["loss"])
                self.recorder.push(step, metrics)
                run.watchdog.beat(step)
                if self.looks is not None and self.looks.due(step):
                    self._look(step, self.looks)

                # Evaluate, unless the machine is about to go; SIGTERM ends an evaluation too.
                stopping = run.stop.requested()
                if not stopping and self.evaluator.should_evaluate(step):
                    stopping = not self._evaluate(step, state)

                # Save when it is due or time to leave.
                if stopping or due(step, config):
                    self._save(step, state)
                if stopping:
                    break
            self.recorder.drain()
            self.watch.switch("other")
        return state, step, stopping

    def _throughput(self, program: Program) -> Throughput:
        job, train, layout = self.job, program.train, program.layout
        kind = layout.mesh.devices.flat[0].device_kind
        shape = (job.model, train.batch_size, train.sequence_length, kind, layout.devices)
        executed = executed_flops(job.model, job.optimizer, train, program.backend, layout.devices)
        return dataclasses.replace(Throughput.of(*shape), executed=executed)

    def _evaluate(self, step: int, state: TrainState) -> bool:
        """Evaluate and write the rows; returns False, without rows, when a stop was requested."""
        with self._pause("evaluation"):
            rows = self.evaluator(step, state, self.run.stop.requested)
        for kind, fields in rows or ():
            self.run.event(kind, **fields)
        for kind, fields in rows or ():
            # Neither train from nor publish a model whose loss on a split is not finite.
            looked_at = kind == "evaluation" and step in (0, self.config.steps)
            if looked_at and not math.isfinite(fields["loss"]):
                raise InputError(
                    f"the loss on {fields['split']} after {step} of {self.config.steps} steps is "
                    f"{fields['loss']}, {self._told_skipped(step)}; lower the learning rate or the "
                    "scale of the initial parameters, or start from another checkpoint"
                )
        return rows is not None

    def _look(self, step: int, looks: EarlyLooks) -> None:
        """Compare the loss so far with what the forecast expects of it here."""
        with self._pause("forecast", "other"):
            try:
                found = looks.outside(step)
            except (PonenteError, OSError) as error:
                logger.warning("step %d: not compared with the forecast: %s", step, error)
                return
            if found is not None:
                self.run.event("off_forecast", **found)

    def _told_skipped(self, step: int) -> str:
        return f"and {self.recorder.updates.skipped:,.0f} of the {step:,} updates were not applied"

    def _save(self, step: int, state: TrainState) -> None:
        with self._pause("checkpoint"):
            self.history = self.run.log.history if self.run.log is not None else ()
            progress = {
                "data_offset": data_offset(self.job.data, self.config, step),
                "history": to_relative(self.history, self.checkpointer.path_of(step)),
                "evaluated": self.evaluator.evaluated,
                "updates": self.recorder.updates,
            }
            self.checkpointer.save(step, state, progress)
        self.run.saved(step)

    @contextmanager
    def _pause(self, phase: str, bucket: str = "") -> Iterator[None]:
        """Write the newest row; the time inside counts in `bucket` (default `phase`), in no row."""
        self.recorder.drain()
        with self.run.phase(phase, bucket):
            yield

    def _result(self, steps: int, preempted: bool) -> TrainResult:
        spent = self.watch.seconds()
        devices = self.program.layout.mesh.devices.flat
        committed = self.checkpointer.committed
        if not preempted and not self.recorder.updates.applied:
            raise InputError(
                f"no step changed the model, {self._told_skipped(steps)}: loss, gradients or new "
                "parameters were not finite, the loss was a spike, or no token was counted; lower "
                "the learning rate, or inspect the data"
            )
        assert preempted or committed, "the last step has a checkpoint"
        return TrainResult(
            steps=steps,
            history=tuple(self.history),
            skipped=int(self.recorder.updates.skipped),
            checkpoint=committed[-1][1] if committed else "",
            checkpoints=committed,
            preempted=preempted,
            devices=f"{len(devices)} x {devices[0].device_kind}",
            hardware=_hardware(list(devices)),
            backend=self.program.backend,
            backend_reason=self.program.backend_reason,
            notes=list(self.program.notes),
            memory=self.program.estimate.parts,
            seconds={**spent, "total": sum(spent.values())},
            compilations=self.compiler.count,
        )


def _hardware(devices: Sequence[jax.Device]) -> dict[str, Any]:
    """`TrainResult.hardware`."""
    found = dataclasses.asdict(described(devices))
    own = found["platform"] == "cpu"
    return found | ({"processor": processor(), "cores": cores()} if own else {})
