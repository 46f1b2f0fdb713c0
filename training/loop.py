"""The training loop: batches in, checkpoints and metric rows out.

The host never waits for the newest step: it queues step k and then reads the numbers of step k-1.
Only evaluation, a checkpoint and the end wait. A resumed run sees the batches, computes the losses
and ends with the parameters of the run that was never interrupted, bit for bit on the same devices.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import jax
import numpy as np

from data.dataset import Dataset
from data.loader import Loader
from data.token_array import TokenArray
from training import distributed, host_memory
from training.beginning import Beginning, begin
from training.checkpoint import Checkpointer, Commit
from training.distributed import Coordinator
from training.evaluation import EvaluationBatch, evaluate, validation_batches
from training.job import Row, TrainJob, TrainResult, check_job
from training.metrics import Recorder, Throughput
from training.position import position
from training.preemption import StopSignal
from training.program import Program, build_program, stage_programs
from training.stages import Stage
from training.state import TrainState
from training.watchdog import CoordinationBoard, Watchdog

logger = logging.getLogger(__name__)

Progress = Callable[[int, int, Row], None]
Event = Callable[[str, dict[str, Any]], None]
PARTS = ("start", "compile", "train", "evaluate", "checkpoint", "data_wait", "total")


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
        on_drop: (step, path) of a checkpoint about to be deleted; remove its record. Process 0.
        on_progress: (step, steps, row) every `log_every` steps. Process 0.
        on_event: ("damaged_checkpoint", "evaluation", "resumed", "preempted", fields). Process 0.
        devices: to run on; default all.

    Raises:
        InputError: the job is refused, or training diverged for `max_skipped` steps.
        DamagedOutput: there are checkpoints to resume from and none is sound.
        StorageError: a checkpoint could not be written.
    """
    began = time.perf_counter()
    check_job(job)
    distributed.initialize(coordinator)
    setting = {"eos_id": job.data.eos_id, "padded": job.padded}
    devices = devices or jax.devices()
    program = build_program(job.model, job.optimizer, job.train, devices, **setting)
    stages = stage_programs(program, job.optimizer, job.train, devices, **setting)
    with (
        host_memory.kept(program.layout.platform),
        StopSignal(many_processes=coordinator is not None) as stop,
        _watchdog(job, on_event) as watchdog,
    ):
        run = _Run(job, program, stages, watchdog, stop, on_progress, on_event, began)
        result = run.go(on_commit, on_drop)
    if coordinator is not None:
        distributed.shutdown()
    return result


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
    """One run's mutable parts: state, history, clocks."""

    def __init__(
        self,
        job: TrainJob,
        program: Program,
        stages: Sequence[tuple[Stage, Program]],
        watchdog: Watchdog,
        stop: StopSignal,
        on_progress: Progress | None,
        on_event: Event | None,
        began: float,
    ) -> None:
        self.job = job
        self.config = job.train
        self.program = program
        self.stages = stages
        self.watchdog = watchdog
        self.stop = stop
        self.on_progress = on_progress
        self.on_event = on_event
        self.began = began
        self.leader = jax.process_index() == 0
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.events: list[dict[str, Any]] = []
        self.rows: list[Row] = []
        self.compilations = 0
        self.evaluations: list[Row] = []
        if self.leader:
            for note in program.notes:
                logger.info("%s", note)

    def go(self, on_commit: Commit | None, on_drop: Commit | None) -> TrainResult:
        """Begin or resume, train, and drain the last checkpoint."""
        start, compiled = self._begin_and_compile()
        self.rows, self.evaluations = start.history, start.evaluations
        if start.event is not None:
            self._event(start.event[0], **start.event[1])
        self.validation = self._validation()
        self.token_bytes = jax.device_put(
            np.asarray(self.job.token_bytes, np.int32), self.program.layout.replicated
        )
        self.recorder = self._recorder()
        with ExitStack() as stack:
            self.checkpointer = Checkpointer(
                self.job.checkpoint_directory,
                attempt=self.job.attempt,
                on_commit=on_commit,
                on_drop=on_drop,
                keep=self.config.keep_checkpoints,
                existing=start.existing,
            )
            stack.enter_context(closing(self.checkpointer))
            steps, preempted = start.step, compiled is None and start.step < self.config.steps
            if compiled is not None and start.step < self.config.steps:
                dataset = stack.enter_context(Dataset(self.job.data))
                steps, preempted = self._train(start, compiled, dataset)
            with self._pause("checkpoint"):
                self.checkpointer.wait()
        return self._result(steps, preempted)

    def _begin_and_compile(self) -> tuple[Beginning, Any]:
        """`begin` while the first step is compiled: that needs no arrays, and they little of it.

        The compiled step is None where there is nothing to do, or SIGTERM came while compiling.
        """
        compiler = ThreadPoolExecutor(1, "compile")
        try:
            early = self._likely_stage()
            compiling = compiler.submit(self._compile, early) if early is not None else None
            with self.watchdog.phase("restore or init"):
                start = begin(self.job, self.program, self._damaged)
            began = time.perf_counter()
            self.seconds["start"] = began - self.began
            stage = next((s for s, _ in self.stages if s.end > start.step), None)
            if stage is None:
                return start, None
            if compiling is None or stage is not early:
                compiling = compiler.submit(self._compile, stage)
            with self.watchdog.phase("compile"):
                compiled = self._unless_stopped(compiling)
            self.seconds["compile"] = time.perf_counter() - began
        finally:
            compiler.shutdown(wait=False)
        return start, compiled

    def _likely_stage(self) -> Stage | None:
        """The stage that the newest checkpoint is in; None where only reading it will tell."""
        job = self.job
        if not job.resume_from and job.start is not None and job.start.take == "everything":
            return None
        likely = job.resume_from[-1][0] if job.resume_from else 0
        return next((stage for stage, _ in self.stages if stage.end > likely), None)

    def _unless_stopped(self, compiling: Future[Any]) -> Any:
        """The compiled step; None when SIGTERM came first, for compiling may take minutes."""
        while not wait_for([compiling], timeout=0.2).done:
            if self.stop.alone:
                return None
        return compiling.result()

    def _compile(self, stage: Stage) -> Any:
        self.compilations += 1
        return dict(self.stages)[stage].compile()

    def _train(self, start: Beginning, compiled: Any, dataset: Dataset) -> tuple[int, bool]:
        """Every stage from where the run begins: steps done, and whether it was preempted."""
        state, step = start.state, start.step
        if self._evaluation_due(step):
            self._evaluate(step, state)
        for stage, program in self.stages:
            if stage.end <= step:
                continue
            if compiled is None:
                with self._pause("compile"):
                    compiled = self._compile(stage)
            self.recorder.throughput = self._throughput(program)
            with self._loader(dataset, stage, step) as loader:
                state, step = self._stage(state, step, stage, program, compiled, loader)
            compiled = None
            if step < stage.end:
                return step, True
        return step, False

    def _stage(
        self,
        state: TrainState,
        start: int,
        stage: Stage,
        program: Program,
        compiled: Any,
        loader: Loader,
    ) -> tuple[TrainState, int]:
        config, layout, batch_size = self.config, program.layout, program.train.batch_size
        mask = layout.place(
            np.ones((batch_size // jax.process_count(), program.train.sequence_length), np.float32),
            batch_size,
        )
        self.recorder.restart_clock()
        waited, step = 0.0, start
        for step, batch in zip(range(start + 1, stage.end + 1), loader, strict=False):
            tokens = layout.place(stage.cut(batch), batch_size)
            state, metrics = compiled(state, tokens, mask)
            self.recorder.push(step, metrics, loader.waited - waited)
            waited = loader.waited
            self.watchdog.beat(step)
            last, stopping = step == config.steps, self.stop.requested()
            if self._evaluation_due(step) and (last or not stopping):
                self._evaluate(step, state)
            if last or stopping or step % config.checkpoint_every == 0:
                self._save(step, state)
            if stopping and not last:
                self._event("preempted", step=step)
                break
        self.seconds["data_wait"] += loader.waited
        return state, step

    def _evaluation_due(self, step: int) -> bool:
        """Also when a run resumes where a preempted one had no time left for it."""
        due = step % self.config.evaluate_every == 0 or step == self.config.steps
        return due and not any(row["step"] == step for row in self.evaluations)

    def _evaluate(self, step: int, state: TrainState) -> None:
        if not self.validation:
            return
        with self._pause("evaluate"):
            scores = evaluate(
                self.program.evaluation_step, state.scored, self.validation, self.token_bytes
            )
            self.evaluations.append({"step": step, **scores})
            self._event("evaluation", step=step, **scores)

    def _save(self, step: int, state: TrainState) -> None:
        with self._pause("checkpoint"):
            # Processes meet in a collective to save; none may still have one of a step to do.
            jax.block_until_ready(state)
            history = {
                "rows": self.rows,
                "evaluations": self.evaluations,
                "position": position(self.job.data, self.config, step),
            }
            self.checkpointer.save(step, state, history)

    @contextmanager
    def _pause(self, part: str) -> Iterator[None]:
        """Time that belongs to `part` and to no row; the newest step's row is written first."""
        self.recorder.drain()
        began = time.perf_counter()
        with self.watchdog.phase(part):
            yield
        self.seconds[part] += time.perf_counter() - began
        self.recorder.restart_clock()

    def _throughput(self, program: Program) -> Throughput:
        layout, train = program.layout, program.train
        return Throughput.of(
            self.job.model,
            train.batch_size,
            train.sequence_length,
            layout.mesh.devices.flat[0].device_kind,
            layout.devices,
        )

    def _recorder(self) -> Recorder:
        throughput = self._throughput(self.program)
        return Recorder(self.rows, throughput, self.config.max_skipped, self._progress)

    def _progress(self, row: Row) -> None:
        self.seconds["train"] += row["seconds"]
        step = int(row["step"])
        due = step % self.config.log_every == 0 or step == self.config.steps
        if self.leader and due and self.on_progress is not None:
            self.on_progress(step, self.config.steps, row)

    def _event(self, kind: str, **fields: Any) -> None:
        self.events.append({"kind": kind, **fields})
        if self.leader and self.on_event is not None:
            self.on_event(kind, fields)

    def _damaged(self, step: int, path: str, reason: str) -> None:
        self._event("damaged_checkpoint", step=step, path=path, reason=reason)

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

    def _validation(self) -> list[EvaluationBatch]:
        shards = self.job.validation_shards
        if not shards:
            return []
        data = self.job.data
        with TokenArray(shards, data.vocab_size, tokenizer_digest=data.tokenizer) as tokens:
            return validation_batches(len(tokens), tokens.read, self.config, self.program.layout)

    def _result(self, steps: int, preempted: bool) -> TrainResult:
        self.seconds["total"] = time.perf_counter() - self.began
        latest = self.checkpointer.latest
        assert preempted or latest is not None, "the last step has a checkpoint"
        return TrainResult(
            steps=steps,
            history=self.rows,
            evaluations=self.evaluations,
            checkpoint=latest[1] if latest is not None else "",
            preempted=preempted,
            backend=self.program.backend,
            backend_reason=self.program.backend_reason,
            notes=list(self.program.notes),
            seconds=self.seconds,
            compilations=self.compilations,
            events=self.events,
        )
