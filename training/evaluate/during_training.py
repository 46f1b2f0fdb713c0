"""Evaluation between the steps of a run: losses on held-out splits, and generated samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from training.config.job import MetricsRow, TrainJob
from training.evaluate.evaluator import Evaluator, Interrupted
from training.metrics.stopwatch import Stopwatch
from training.step.program import Program
from training.step.state import TrainState

if TYPE_CHECKING:
    from training.evaluate.generate_samples import SampleGenerator


class InTrainingEvaluation:
    """Evaluates a run and generates samples. Close it after use.

    Attributes:
        evaluated: step of the last evaluation, also by earlier attempts; -1 before the first.

    Raises:
        InputError: a held-out split or a prompt cannot be used.
    """

    def __init__(self, job: TrainJob, program: Program, watch: Stopwatch, evaluated: int) -> None:
        train = job.train
        self._job = job
        self._watch = watch
        self.evaluated = evaluated
        self._evaluator = Evaluator(
            program.evaluation_step,
            program.layout,
            job.splits,
            job.token_bytes,
            tokenizer=job.data.tokenizer,
            stored_ids=job.data.stored_ids,
            sequence_length=train.sequence_length,
            batch_size=train.evaluation_batch,
            sequences=train.evaluate_sequences,
        )
        self._generator: SampleGenerator | None = None
        if job.prompts is not None:
            # Imports the tokenizer libraries (0.2 s), which a run without prompts does not need.
            from training.evaluate.generate_samples import SampleGenerator

            dtype = program.train.compute_dtype
            self._generator = SampleGenerator(job.prompts, program.model, program.layout, dtype)

    def should_evaluate(self, step: int) -> bool:
        """Whether to evaluate after `step`; true too when a preempted attempt left it out."""
        if not self._job.splits and self._job.prompts is None:
            return False
        due = step % self._job.train.evaluate_every == 0 or step == self._job.train.steps
        return due and self.evaluated < step

    def __call__(
        self, step: int, state: TrainState, stopping: Callable[[], bool]
    ) -> list[tuple[str, MetricsRow]] | None:
        """The rows ("evaluation" or "sample", fields) after a step; None when it was cancelled.

        Every process calls it. `stopping` is called before every batch.
        """
        try:
            scores = self._evaluator(state.eval_params, stopping)
        except Interrupted:
            return None
        rows = [("evaluation", {"step": step, **score}) for score in scores]
        if self._generator is not None:
            with self._watch.during("samples"):
                texts = self._generator(state.eval_params)
            rows += [("sample", {"step": step, **text}) for text in texts]
        self.evaluated = step
        return rows

    def close(self) -> None:
        self._evaluator.close()
