"""The training loop: batches in, checkpoints and metric rows out.

The host never waits for the newest step: it queues step k and then reads the numbers of step k-1.
Only evaluation, a checkpoint and the end wait. A resumed run sees the batches, computes the losses
and ends with the parameters of the run that was never interrupted, bit for bit on the same devices.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import jax
import numpy as np

from data.dataset import Dataset
from data.loader import Loader
from data.token_array import TokenArray
from training import distributed, host_memory
from training.checkpoint import Checkpointer, Commit
from training.distributed import Coordinator
from training.evaluation import EvaluationBatch, evaluate, validation_batches
from training.job import Row, TrainJob, TrainResult, check_job
from training.metrics import Recorder, Throughput
from training.preemption import StopSignal
from training.program import Program, build_program
from training.restore import newest_sound
from training.state import TrainState

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
    program = build_program(
        job.model,
        job.optimizer,
        job.train,
        devices or jax.devices(),
        eos_id=job.data.eos_id,
        padded=job.padded,
    )
    run = _Run(job, program, on_progress, on_event, began)
    with (
        host_memory.kept(program.layout.platform),
        StopSignal(many_processes=coordinator is not None) as stop,
    ):
        result = run.go(on_commit, on_drop, stop)
    if coordinator is not None:
        distributed.shutdown()
    return result


class _Run:
    """One run's mutable parts: state, history, clocks."""

    def __init__(
        self,
        job: TrainJob,
        program: Program,
        on_progress: Progress | None,
        on_event: Event | None,
        began: float,
    ) -> None:
        self.job = job
        self.config = job.train
        self.program = program
        self.on_progress = on_progress
        self.on_event = on_event
        self.began = began
        self.leader = jax.process_index() == 0
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.events: list[dict[str, Any]] = []
        self.rows: list[Row] = []
        self.step: Any = None
        self.compilations = 0
        self.evaluations: list[Row] = []
        if self.leader:
            for note in program.notes:
                logger.info("%s", note)

    def go(self, on_commit: Commit | None, on_drop: Commit | None, stop: StopSignal) -> TrainResult:
        """Begin or resume, train, and drain the last checkpoint."""
        state, start, existing = self._begin_and_compile()
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
                existing=existing,
            )
            stack.enter_context(closing(self.checkpointer))
            steps, preempted = start, False
            if start < self.config.steps:
                dataset = stack.enter_context(Dataset(self.job.data))
                loader = stack.enter_context(self._loader(dataset, start))
                steps, preempted = self._loop(state, start, loader, stop)
            with self._pause("checkpoint"):
                self.checkpointer.wait()
        return self._result(steps, preempted)

    def _begin_and_compile(self) -> tuple[TrainState, int, Sequence[tuple[int, str]]]:
        """`_begin` while the step is compiled: that needs no arrays, and they need little of it."""
        steps = self.config.steps
        likely = not self.job.resume_from or self.job.resume_from[-1][0] < steps
        with ThreadPoolExecutor(1, "compile") as compiler:
            compiling = compiler.submit(self.program.compile) if likely else None
            state, start, existing = self._begin()
            began = time.perf_counter()
            self.seconds["start"] = began - self.began
            if compiling is not None:
                self.step, self.compilations = compiling.result(), 1
            elif start < steps:  # the newest checkpoint was damaged
                self.step, self.compilations = self.program.compile(), 1
            self.seconds["compile"] = time.perf_counter() - began
        return state, start, existing

    def _begin(self) -> tuple[TrainState, int, Sequence[tuple[int, str]]]:
        found = newest_sound(self.job.resume_from, self.program.abstract, self._damaged)
        if found is None:
            return self.program.init(), 0, ()
        step, path, state, history = found
        self.rows, self.evaluations = history["rows"], history["evaluations"]
        self._event("resumed", step=step, path=path)
        kept = self.job.resume_from[: self.job.resume_from.index((step, path)) + 1]
        return state, step, kept

    def _loop(
        self, state: TrainState, start: int, loader: Loader, stop: StopSignal
    ) -> tuple[int, bool]:
        config, layout = self.config, self.program.layout
        mask = self._ones()
        if start == 0:
            self._evaluate(0, state)
        self.recorder.restart_clock()
        waited = 0.0
        for step, batch in zip(range(start + 1, config.steps + 1), loader, strict=False):
            tokens = layout.place(batch, config.batch_size)
            state, metrics = self.step(state, tokens, mask)
            self.recorder.push(step, metrics, loader.waited - waited)
            waited = loader.waited
            last, stopping = step == config.steps, stop.requested(step)
            if last or step % config.evaluate_every == 0:
                self._evaluate(step, state)
            if last or stopping or step % config.checkpoint_every == 0:
                self._save(step, state)
            if stopping and not last:
                self._event("preempted", step=step)
                self.seconds["data_wait"] = waited
                return step, True
        self.seconds["data_wait"] = waited
        return config.steps, False

    def _evaluate(self, step: int, state: TrainState) -> None:
        if not self.validation:
            return
        with self._pause("evaluate"):
            scores = evaluate(
                self.program.evaluation_step, state.model, self.validation, self.token_bytes
            )
            self.evaluations.append({"step": step, **scores})
            self._event("evaluation", step=step, **scores)

    def _save(self, step: int, state: TrainState) -> None:
        with self._pause("checkpoint"):
            # Processes meet in a collective to save; none may still have one of a step to do.
            jax.block_until_ready(state)
            history = {"rows": self.rows, "evaluations": self.evaluations}
            self.checkpointer.save(step, state, history)

    @contextmanager
    def _pause(self, part: str) -> Iterator[None]:
        """Time that belongs to `part` and to no row; the newest step's row is written first."""
        self.recorder.drain()
        began = time.perf_counter()
        yield
        self.seconds[part] += time.perf_counter() - began
        self.recorder.restart_clock()

    def _recorder(self) -> Recorder:
        job, layout = self.job, self.program.layout
        throughput = Throughput.of(
            job.model,
            job.train.batch_size,
            job.train.sequence_length,
            layout.mesh.devices.flat[0].device_kind,
            layout.devices,
        )
        return Recorder(self.rows, throughput, job.train.max_skipped, self._progress)

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

    def _loader(self, dataset: Dataset, start: int) -> Loader:
        return Loader(
            dataset,
            batch_size=self.config.batch_size,
            process_index=jax.process_index(),
            process_count=jax.process_count(),
            start_batch=start,
            stop_batch=self.config.steps,
        )

    def _ones(self) -> jax.Array:
        rows = self.config.batch_size // jax.process_count()
        ones = np.ones((rows, self.config.sequence_length), np.float32)
        return self.program.layout.place(ones, self.config.batch_size)

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
        assert latest is not None, "the last step has a checkpoint"
        return TrainResult(
            steps=steps,
            history=self.rows,
            evaluations=self.evaluations,
            checkpoint=latest[1],
            preempted=preempted,
            backend=self.program.backend,
            backend_reason=self.program.backend_reason,
            notes=list(self.program.notes),
            seconds=self.seconds,
            compilations=self.compilations,
            events=self.events,
        )
