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
from training import distributed, host_memory
from training.beginning import Beginning
from training.checkpoint import Checkpointer, Commit
from training.clock import Feed, Stopwatch
from training.distributed import Coordinator
from training.examiner import Examiner
from training.job import Row, TrainJob, TrainResult, check_job
from training.metrics import PeakMemory, Recorder
from training.observer import Observer
from training.opening import CompiledStage, StageCompiler, compile_later, open_run
from training.position import position
from training.preemption import StopSignal
from training.program import Program, build_program, stage_programs
from training.retention import Retention, due
from training.stages import Stage
from training.state import TrainState
from training.watchdog import CoordinationBoard, Watchdog

logger = logging.getLogger(__name__)

Progress = Callable[[int, int, Row], None]
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
    host_memory.share_one_heap()
    distributed.initialize(coordinator)
    setting = {"eos_id": job.data.eos_id, "padded": job.padded}
    devices = devices or jax.devices()
    program = build_program(job.model, job.optimizer, job.train, devices, **setting)
    stages = stage_programs(program, job.optimizer, job.train, devices, **setting)
    observer = _observer(job, program, watch, on_event)
    with (
        host_memory.kept(program.layout.platform),
        StopSignal(many_processes=coordinator is not None) as stop,
        _watchdog(job, on_event) as watchdog,
    ):
        run = _Run(job, program, stages, observer, watchdog, stop, on_progress, on_event)
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


class _Run:
    """One run's mutable parts: history and clocks."""

    def __init__(
        self,
        job: TrainJob,
        program: Program,
        stages: Sequence[tuple[Stage, Program]],
        observer: Observer,
        watchdog: Watchdog,
        stop: StopSignal,
        on_progress: Progress | None,
        on_event: Event | None,
    ) -> None:
        self.job = job
        self.config = job.train
        self.program = program
        self.stages = stages
        self.observer = observer
        self.watch = observer.watch
        self.watchdog = watchdog
        self.stop = stop
        self.on_progress = on_progress
        self.on_event = on_event
        self.leader = jax.process_index() == 0
        self.compiler = StageCompiler(job, stages)
        self.events: list[dict[str, Any]] = []
        self.rows: list[Row] = []
        self.evaluations: list[Row] = []
        self.samples: list[Row] = []
        if self.leader:
            for note in program.notes:
                logger.info("%s", note)

    def go(self, on_commit: Commit | None, on_drop: Commit | None) -> TrainResult:
        """Begin or resume, train, and drain the last checkpoint."""
        start, compiled = open_run(
            self.job,
            self.program,
            self.stages,
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
                self.examiner = stack.enter_context(
                    closing(Examiner(self.job, self.program, self.watch))
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
        self, start: Beginning, compiled: CompiledStage | None, dataset: Dataset
    ) -> tuple[int, bool]:
        """Every stage from where the run begins: steps done, and whether it was preempted."""
        state, step = start.state, start.step
        if step < self.config.steps:
            self.checkpointer.reserve(state)
        if self._to_examine(step):  # new parameters, or the attempt before had no time for it
            if not self._examine(step, state):
                self._event("preempted", step=step)
                return step, True
            if step == self.config.steps:
                self._save(step, state)
        for stage, program in self.stages:
            if stage.end <= step:
                continue
            if compiled is None:
                with self._pause("compile"), self.watch.during("compile"):
                    compiled = compile_later(self.compiler, stage, self.stop)
            if compiled is None:
                if self.checkpointer.begun != step:
                    self._save(step, state)
                self._event("preempted", step=step)
                break
            self.recorder.throughput = compiled.throughput
            with self._loader(dataset, stage, step) as loader:
                state, step, stopped = self._stage(
                    state, step, stage, program, compiled.step, loader
                )
            compiled = None
            if stopped:
                break
        return step, step < self.config.steps or self._to_examine(step)

    def _stage(
        self,
        state: TrainState,
        start: int,
        stage: Stage,
        program: Program,
        compiled: Any,
        loader: Loader,
    ) -> tuple[TrainState, int, bool]:
        config, layout, batch_size = self.config, program.layout, program.train.batch_size
        mask = layout.place(
            np.ones((batch_size // jax.process_count(), program.train.sequence_length), np.float32),
            batch_size,
        )
        feed, step, stopping = Feed(loader, self.watch), start, False
        # Writing a trace may take minutes. It begins after the wait for a batch of its own.
        profiling = functools.partial(self._pause, "profile", feed)
        self.watch.switch("step")
        self.recorder.restart_clock()
        for step, batch in zip(range(start + 1, stage.end + 1), feed, strict=False):
            self.observer.profile(step, profiling)
            tokens = layout.place(stage.cut(batch), batch_size)
            state, metrics = compiled(state, tokens, mask)
            feed.runs(metrics["loss"])
            self.recorder.push(step, metrics, feed.take_waited())
            self.watchdog.beat(step)
            last, stopping = step == config.steps, self.stop.requested()
            if not stopping and self._to_examine(step):
                stopping = not self._examine(step, state)
            if stopping or due(step, config):
                self._save(step, state)
            if stopping and (not last or self._to_examine(step)):
                self._event("preempted", step=step)
                break
        self.recorder.drain()
        return state, step, stopping

    def _to_examine(self, step: int) -> bool:
        return self.examiner.due(step, self.evaluations, self.samples)

    def _examine(self, step: int, state: TrainState) -> bool:
        """Score and write; False where a signal to stop came first, and there are no rows."""
        with self._pause("evaluation"):
            found = self.examiner(step, state, self.stop.requested)
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
                "position": position(self.job.data, self.config, step),
            }
            self.checkpointer.save(step, state, history)
        self.observer.saved(step)

    @contextmanager
    def _pause(self, phase: str, feed: Feed | None = None) -> Iterator[None]:
        """Time that belongs to no row; the newest step's row is written first, with its waits."""
        self.recorder.drain(feed.take_waited() if feed is not None else 0.0)
        with self.watchdog.phase(phase):
            yield
        self.recorder.restart_clock()

    def _checkpointer(
        self, start: Beginning, on_commit: Commit | None, on_drop: Commit | None
    ) -> Checkpointer:
        config = self.config
        return Checkpointer(
            self.job.checkpoint_directory,
            attempt=self.job.attempt,
            on_commit=on_commit,
            on_drop=on_drop,
            on_failure=self._failed,
            retention=Retention(
                newest=config.keep_checkpoints,
                every=config.keep_every,
                milestones=config.milestones,
            ),
            existing=start.existing,
        )

    def _recorder(self, compiled: CompiledStage | None) -> Recorder:
        throughput = compiled.throughput if compiled is not None else None
        memory, skipped = PeakMemory(jax.local_devices()), self.config.max_skipped
        return Recorder(self.rows, throughput, skipped, self._progress, memory=memory)

    def _progress(self, row: Row) -> None:
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

    def _loader(self, dataset: Dataset, stage: Stage, step: int) -> Loader:
        return Loader(
            dataset,
            batch_size=stage.rows,
            process_index=jax.process_index(),
            process_count=jax.process_count(),
            start_batch=step - stage.first,
            stop_batch=stage.end - stage.first,
            first=stage.position,
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
