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

    Args:
        job: the run.
        program: the run's program.
        watch: the run's stopwatch, in `evaluation` during a call.

    Raises:
        InputError: a held-out split or a prompt cannot be used.
    """

    def __init__(self, job: TrainJob, program: Program, watch: Stopwatch) -> None:
        self._every, self._last = job.train.evaluate_every, job.train.steps
        self._nothing_to_evaluate = not job.held_out and job.prompts is None
        self._watch = watch
        self._evaluator = _evaluator(job, program)
        self._generator: SampleGenerator | None = None
        if job.prompts is not None:
            # Imports the tokenizer libraries (0.2 s), which a run without prompts does not need.
            from training.evaluate.generate_samples import SampleGenerator

            dtype = program.train.compute_dtype
            self._generator = SampleGenerator(job.prompts, program.model, program.layout, dtype)

    def should_evaluate(self, step: int, evaluated: int) -> bool:
        """Whether to evaluate after `step`; true too when a preempted attempt left it out.

        Args:
            step: steps done.
            evaluated: step of the last evaluation, -1 before the first.
        """
        due = step % self._every == 0 or step == self._last
        return due and evaluated < step and not self._nothing_to_evaluate

    def __call__(
        self, step: int, state: TrainState, stopping: Callable[[], bool]
    ) -> tuple[list[MetricsRow], list[MetricsRow]] | None:
        """(rows of the held-out splits, rows of the prompts), or None when it was cancelled.

        Every process calls it.

        Args:
            step: steps done.
            state: training state after `step`.
            stopping: called before every batch; returns whether to cancel.
        """
        try:
            rows = self._evaluator(state.eval_params, stopping)
        except Interrupted:
            return None
        scores = [{"step": step, **row} for row in rows]
        if self._generator is None:
            return scores, []
        with self._watch.during("samples"):
            return scores, [{"step": step, **text} for text in self._generator(state.eval_params)]

    def close(self) -> None:
        """Close the splits' files."""
        self._evaluator.close()


def _evaluator(job: TrainJob, program: Program) -> Evaluator:
    train = job.train
    return Evaluator(
        program.evaluation_step,
        program.layout,
        job.held_out,
        job.token_bytes,
        tokenizer=job.data.tokenizer,
        stored_ids=job.data.stored_ids,
        sequence_length=train.sequence_length,
        batch_size=train.evaluate_batch_size or train.batch_size,
        sequences=train.evaluate_sequences,
    )
