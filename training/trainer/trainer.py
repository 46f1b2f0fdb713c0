"""The training loop: batches in, checkpoints and metric rows out.

The host never waits for the newest step: it queues step k and then reads the numbers of step k-1.
Only evaluation, a checkpoint and the end wait. A resumed run sees the batches, computes the losses
and ends with the parameters of the run that was never interrupted, bit for bit on the same devices.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from types import TracebackType
from typing import Any

import jax
import numpy as np

from data.batches.dataset import Dataset
from data.batches.loader import Loader
from pipeline.errors import InputError, StorageError
from training.checkpoint.checkpointer import Checkpointer, Commit
from training.checkpoint.retention import Retention, due
from training.config.batch_schedule import BatchPhase
from training.config.job import MetricsRow, TrainJob, TrainResult, check_job
from training.evaluate.during_training import InTrainingEvaluation
from training.fault.preemption import StopSignal
from training.fault.watchdog import CoordinationBoard, Watchdog
from training.metrics.observer import Observer
from training.metrics.recorder import Recorder
from training.metrics.stopwatch import Stopwatch
from training.metrics.throughput import PeakMemory
from training.sharding import distributed
from training.sharding.distributed import Coordinator
from training.step.program import Program, build_program, phase_programs
from training.step.state import TrainState
from training.trainer import compile_ahead, cpu_malloc
from training.trainer.compile_ahead import CompiledPhase, PhaseCompiler
from training.trainer.data_offset import data_offset
from training.trainer.data_wait import TimedBatches
from training.trainer.initial_state import InitialState

logger = logging.getLogger(__name__)

Progress = Callable[[int, int, MetricsRow], None]
Event = Callable[[str, dict[str, Any]], None]


def train(
    job: TrainJob,
    *,
    coordinator: Coordinator | None = None,
    on_commit: Commit | None = None,
    on_drop: Commit | None = None,
    on_progress: Progress | None = None,
    on_event: Event | None = None,
    devices: Sequence[Any] | None = None,
) -> TrainResult:
    """Run `job` to its last step, or until SIGTERM.

    Args:
        job: what to train; the same in every process.
        coordinator: where the processes meet; None for a single process.
        on_commit: (step, path) of a complete checkpoint; write its record. Process 0, in a thread.
        on_drop: (step, path) of a checkpoint about to be deleted, or found damaged beside a sound
            older one; remove its record. Process 0.
        on_progress: (step, steps, row) every `log_every` steps. Process 0.
        on_event: (kind, fields): "damaged_checkpoint", "failed_checkpoint", "resumed",
            "started_from", "evaluation", "sample", "tracker" and "preempted" in process 0,
            "watchdog" in any.
        devices: to run on; default all.

    Raises:
        InputError: the job is refused, or training diverged for `max_skipped` steps.
        CorruptOutput: there are checkpoints to resume from and none is sound.
        StorageError: a checkpoint could not be written.
    """
    watch = Stopwatch()
    check_job(job)
    cpu_malloc.share_one_heap()
    distributed.initialize(coordinator)
    setting = {"eos_id": job.data.eos_id, "padded": job.padded}
    devices = devices or jax.devices()
    program = build_program(job.model, job.optimizer, job.train, devices, **setting)
    batch_phases = phase_programs(program, job.optimizer, job.train, devices, **setting)
    observer = _observer(job, program, watch, on_event)
    with (
        cpu_malloc.kept(program.layout.platform),
        StopSignal(many_processes=coordinator is not None) as stop,
        _watchdog(job, on_event) as watchdog,
    ):
        run = _Trainer(job, program, batch_phases, observer, watchdog, stop, on_progress, on_event)
        try:
            result = run.go(on_commit, on_drop)
        except BaseException:
            with watchdog.phase("ending"):
                observer.close("failed")
            raise
        with watchdog.phase("ending"):
            observer.close("preempted" if result.preempted else "finished")
    if coordinator is not None:
        distributed.shutdown()
    return result


def _observer(
    job: TrainJob, program: Program, watch: Stopwatch, on_event: Event | None
) -> Observer:
    def warn(reason: str) -> None:
        if on_event is not None:
            on_event("tracker", {"reason": reason})

    return Observer(
        job,
        watch,
        leader=jax.process_index() == 0,
        device=program.layout.mesh.devices.flat[0].device_kind,
        devices=program.layout.devices,
        processes=jax.process_count(),
        warn=warn,
    )


def _watchdog(job: TrainJob, on_event: Event | None) -> Watchdog:
    many = jax.process_count() > 1

    def tell(report: str) -> None:
        if on_event is not None:
            on_event("watchdog", {"process": jax.process_index(), "report": report})

    return Watchdog(
        job.train.watchdog_seconds,
        index=jax.process_index(),
        count=jax.process_count(),
        board=CoordinationBoard() if many else None,
        on_end=tell,
    )


class _Trainer:
    """One run: its history, its clocks, and what it writes."""

    def __init__(
        self,
        job: TrainJob,
        program: Program,
        batch_phases: Sequence[tuple[BatchPhase, Program]],
        observer: Observer,
        watchdog: Watchdog,
        stop: StopSignal,
        on_progress: Progress | None,
        on_event: Event | None,
    ) -> None:
        self.job = job
        self.config = job.train
        self.program = program
        self.batch_phases = batch_phases
        self.observer = observer
        self.watch = observer.watch
        self.watchdog = watchdog
        self.stop = stop
        self.on_progress = on_progress
        self.on_event = on_event
        self.leader = jax.process_index() == 0
        self.compiler = PhaseCompiler(job, batch_phases)
        self.events: list[dict[str, Any]] = []
        self.rows: list[MetricsRow] = []
        self.evaluations: list[MetricsRow] = []
        self.samples: list[MetricsRow] = []
        if self.leader:
            for note in program.notes:
                logger.info("%s", note)

    def go(self, on_commit: Commit | None, on_drop: Commit | None) -> TrainResult:
        """Begin or resume, train, and drain the last checkpoint."""
        start, compiled = compile_ahead.restore_and_compile(
            self.job,
            self.program,
            self.batch_phases,
            self.compiler,
            watch=self.watch,
            watchdog=self.watchdog,
            stop=self.stop,
            on_damage=self._damaged,
        )
        self.rows, self.evaluations, self.samples = start.rows, start.evaluations, start.samples
        self.observer.began(start.step)
        if start.event is not None:
            self._event(start.event[0], **start.event[1])
        if self.leader and on_drop is not None:
            for passed_over in start.passed_over:
                on_drop(*passed_over)
        self.recorder = self._recorder(compiled)
        with ExitStack() as stack:
            self.checkpointer = self._checkpointer(start, on_commit, on_drop)
            stack.push(self._drain)
            steps, preempted = start.step, compiled is None and start.step < self.config.steps
            if not preempted:
                self.evaluator = stack.enter_context(
                    closing(InTrainingEvaluation(self.job, self.program, self.watch))
                )
                dataset = stack.enter_context(Dataset(self.job.data))
                steps, preempted = self._train(start, compiled, dataset)
        self.watch.switch("other")
        return self._result(steps, preempted)

    def _drain(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Wait for the last checkpoint, also on the way out of an error, which goes first."""
        try:
            with self.watch.during("checkpoint"), self.watchdog.phase("checkpoint"):
                self.checkpointer.wait()
        except (InputError, StorageError) as another:
            if error is None:
                raise
            logger.error("%s", another)

    def _train(
        self, start: InitialState, compiled: CompiledPhase | None, dataset: Dataset
    ) -> tuple[int, bool]:
        """Every batch phase from where the run begins: steps done, and whether it was preempted."""
        state, step = start.state, start.step
        if step < self.config.steps:
            self.checkpointer.reserve(state)
        if self._should_evaluate(step):  # new parameters, or the attempt before had no time for it
            if not self._evaluate(step, state):
                self._event("preempted", step=step)
                return step, True
            if step == self.config.steps:
                self._save(step, state)
        for phase, program in self.batch_phases:
            if phase.end <= step:
                continue
            if compiled is None:
                with self._pause("compile"), self.watch.during("compile"):
                    compiled = compile_ahead.compile_phase(self.compiler, phase, self.stop)
            if compiled is None:
                if self.checkpointer.begun != step:
                    self._save(step, state)
                self._event("preempted", step=step)
                break
            self.recorder.throughput = compiled.throughput
            with self._loader(dataset, phase, program, step) as loader:
                state, step, stopped = self._train_phase(
                    state, step, phase, program, compiled.step, loader
                )
            compiled = None
            if stopped:
                break
        return step, step < self.config.steps or self._should_evaluate(step)

    def _train_phase(
        self,
        state: TrainState,
        start: int,
        phase: BatchPhase,
        program: Program,
        compiled: Any,
        loader: Loader,
    ) -> tuple[TrainState, int, bool]:
        config, layout, batch_size = self.config, program.layout, program.train.batch_size
        rows = layout.process_rows(batch_size)
        mask = layout.place(
            np.ones((len(rows), program.train.sequence_length), np.float32), batch_size
        )
        feed, step, stopping = TimedBatches(loader, self.watch), start, False
        # Writing a trace may take minutes. It begins after the wait for a batch of its own.
        profiling = functools.partial(self._pause, "profile", feed)
        self.watch.switch("step")
        self.recorder.restart_clock()
        for step, batch in zip(range(start + 1, phase.end + 1), feed, strict=False):
            self.observer.profile(step, profiling)
            tokens = layout.place(phase.cut(batch, rows), batch_size)
            state, metrics = compiled(state, tokens, mask)
            feed.set_inflight(metrics["loss"])
            self.recorder.push(step, metrics, feed.pop_data_wait())
            self.watchdog.beat(step)
            last, stopping = step == config.steps, self.stop.requested()
            if not stopping and self._should_evaluate(step):
                stopping = not self._evaluate(step, state)
            if stopping or due(step, config):
                self._save(step, state)
            if stopping and (not last or self._should_evaluate(step)):
                self._event("preempted", step=step)
                break
        self.recorder.drain()
        return state, step, stopping

    def _should_evaluate(self, step: int) -> bool:
        return self.evaluator.should_evaluate(step, self.evaluations, self.samples)

    def _evaluate(self, step: int, state: TrainState) -> bool:
        """Score and write; False where a signal to stop came first, and there are no rows."""
        with self._pause("evaluation"):
            found = self.evaluator(step, state, self.stop.requested)
        if found is None:
            return False
        scores, samples = found
        self.evaluations += scores
        self.samples += samples
        for row in scores:
            self._event("evaluation", **row)
        for row in samples:
            self._event("sample", **row)
        return True

    def _save(self, step: int, state: TrainState) -> None:
        with self._pause("checkpoint"), self.watch.during("checkpoint"):
            history = {
                "rows": self.rows,
                "evaluations": self.evaluations,
                "samples": self.samples,
                "position": data_offset(self.job.data, self.config, step),
            }
            self.checkpointer.save(step, state, history)
        self.observer.saved(step)

    @contextmanager
    def _pause(self, phase: str, feed: TimedBatches | None = None) -> Iterator[None]:
        """Time that belongs to no row; the newest step's row is written first, with its waits."""
        self.recorder.drain(feed.pop_data_wait() if feed is not None else 0.0)
        with self.watchdog.phase(phase):
            yield
        self.recorder.restart_clock()

    def _checkpointer(
        self, start: InitialState, on_commit: Commit | None, on_drop: Commit | None
    ) -> Checkpointer:
        return Checkpointer(
            self.job.checkpoint_directory,
            attempt=self.job.attempt,
            on_commit=on_commit,
            on_drop=on_drop,
            on_failure=self._failed,
            retention=Retention.of(self.config),
            existing=start.existing,
        )

    def _recorder(self, compiled: CompiledPhase | None) -> Recorder:
        throughput = compiled.throughput if compiled is not None else None
        memory, skipped = PeakMemory(jax.local_devices()), self.config.max_skipped
        return Recorder(self.rows, throughput, skipped, self._progress, memory=memory)

    def _progress(self, row: MetricsRow) -> None:
        self.observer.row(row)
        step = int(row["step"])
        shown = step % self.config.log_every == 0 or step == self.config.steps
        if self.leader and shown and self.on_progress is not None:
            self.on_progress(step, self.config.steps, row)

    def _event(self, kind: str, **fields: Any) -> None:
        self.events.append({"kind": kind, **fields})
        self.observer.event(kind, fields)
        if self.leader and self.on_event is not None:
            self.on_event(kind, fields)

    def _damaged(self, step: int, path: str, reason: str) -> None:
        self._event("damaged_checkpoint", step=step, path=path, reason=reason)

    def _failed(self, step: int, reason: str) -> None:
        self._event("failed_checkpoint", step=step, reason=reason)

    def _loader(self, dataset: Dataset, phase: BatchPhase, program: Program, step: int) -> Loader:
        rows = program.layout.process_rows(program.train.batch_size)
        return Loader(
            dataset,
            batch_size=phase.rows,
            rows=phase.read_rows(rows),
            start_batch=step - phase.first,
            stop_batch=phase.end - phase.first,
            first=phase.data_offset,
        )

    def _result(self, steps: int, preempted: bool) -> TrainResult:
        spent = self.watch.seconds()
        latest = self.checkpointer.latest
        assert preempted or latest is not None, "the last step has a checkpoint"
        return TrainResult(
            steps=steps,
            history=self.rows,
            evaluations=self.evaluations,
            samples=self.samples,
            checkpoint=latest[1] if latest is not None else "",
            checkpoints=self.checkpointer.committed,
            preempted=preempted,
            backend=self.program.backend,
            backend_reason=self.program.backend_reason,
            notes=list(self.program.notes),
            seconds={**spent, "total": sum(spent.values())},
            compilations=self.compiler.count,
            events=self.events,
        )
