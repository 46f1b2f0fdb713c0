"""Loss and bits per byte on held-out splits, of the same sequences every time on any hardware.

A split is cut into sequences in order; the last may be shorter. An evaluation reads all of them, or
a fixed number spread evenly over the split, so that no part of it (a crawl, a file) dominates.
The sum of a sequence is float32 and the host adds the sequences in float64, so the result depends
on neither the batch size nor the number of devices, except for rounding within a sequence. All
counted tokens have the same weight. Bits per byte are the summed negative log-likelihood (in bits)
/ the UTF-8 bytes of the predicted tokens, so models with different tokenizers can be compared.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from data.cache.token_array import TokenArray
from data.cache.token_shard import TokenShard
from models.transformer import Transformer
from pipeline.errors import InputError
from training.config.job import MetricsRow, TrainJob
from training.metrics.differences import SequenceLosses
from training.metrics.stopwatch import Stopwatch
from training.sharding.layout import Layout
from training.step.program import Program
from training.step.state import TrainState
from training.step.train_step import EvaluationStep

if TYPE_CHECKING:
    from training.evaluate.generate_samples import SampleGenerator

Split = tuple[str, tuple[TokenShard, ...]]
Batch = tuple[jax.Array, jax.Array]
"""Tokens int32 [batch, position] and lengths without padding int32 [batch], on devices."""

IN_FLIGHT = 4
"""Batches whose results the host does not wait for; few enough to fit in memory."""


@dataclass(frozen=True)
class SequenceSpans:
    """Start and number of tokens of each sequence of a split, both int64 [sequence]."""

    starts: np.ndarray
    lengths: np.ndarray

    def digest(self, shards: Sequence[TokenShard]) -> str:
        """Of the tokens, as far as the `check` of every shard is known."""
        found = hashlib.sha256(repr([(shard.tokens, shard.check) for shard in shards]).encode())
        found.update(self.starts.tobytes() + self.lengths.tobytes())
        return found.hexdigest()[:20]


def plan_sequences(tokens: int, length: int, most: int | None = None) -> SequenceSpans:
    """The sequences of a split of so many tokens that an evaluation reads, at most `most`.

    The last sequence of the split has the remainder, if that is 2 or more.
    """
    whole, left = divmod(tokens, length)
    available = whole + (left >= 2)
    count = available if most is None else min(most, available)
    chosen = np.arange(count, dtype=np.int64) * available // max(count, 1)
    starts = chosen * length
    return SequenceSpans(starts, np.minimum(length, tokens - starts))


def read_batches(
    rows: SequenceSpans,
    read: Callable[[np.ndarray, int], np.ndarray],
    length: int,
    batch_size: int,
    layout: Layout,
) -> Iterator[Batch]:
    """The sequences as batches of one shape; each process reads only its own part.

    The last batch is filled up with sequences of length 0. `read` is of a split's token array:
    (starts int64 [n], length) -> int32 [n, length].
    """
    mine = layout.process_rows(batch_size)
    for start in range(0, len(rows.starts), batch_size):
        part = start + mine[mine < len(rows.starts) - start]
        starts, sizes = rows.starts[part], rows.lengths[part]
        tokens, lengths = np.zeros((len(mine), length), np.int32), np.zeros(len(mine), np.int32)
        lengths[: len(sizes)] = sizes
        for size in np.unique(sizes).tolist():  # one read per length; at most two lengths occur
            (at,) = np.nonzero(sizes == size)
            tokens[at, :size] = read(starts[at], size)
        yield layout.place(tokens, batch_size), layout.place(lengths, batch_size)


def fetch(results: Iterable[tuple[jax.Array, ...]]) -> list[Any]:
    """Device results on the host, read once at the end.

    The next result is requested, which queues its computation, when fewer than `IN_FLIGHT` pend.
    """
    found: list[Any] = []
    for result in results:
        found.append(result)
        if len(found) >= IN_FLIGHT:
            jax.block_until_ready(found[-IN_FLIGHT])
    return jax.device_get(found)


def evaluate(
    step: EvaluationStep,
    model: Transformer,
    batches: Iterable[Batch],
    token_bytes: jax.Array,
    name: str,
) -> tuple[MetricsRow, np.ndarray, np.ndarray]:
    """Metrics row of the split `name`: loss (mean nats per token), bits_per_byte, tokens and bytes.

    Omits bits_per_byte when the predicted tokens have no bytes. Also nll, float32, and tokens,
    int32, by sequence; those that fill up the last batch have 0 of both.
    """
    parts = fetch(step(model, *batch, token_bytes) for batch in batches)
    nll, tokens, size = (
        sum(np.sum(part[i], dtype=kind).item() for part in parts)
        for i, kind in enumerate((np.float64, np.int64, np.int64))
    )
    if not tokens:
        raise InputError(f"split {name!r}: expected tokens that count, the loss mask excludes all")
    row: MetricsRow = {
        "split": name,
        "loss": nll / tokens,
        **({"bits_per_byte": nll / math.log(2) / size} if size else {}),
        "tokens": tokens,
        "bytes": size,
    }
    ours, counts = (np.concatenate([part[i] for part in parts]) for i in (0, 1))
    return row, ours, counts


class Interrupted(Exception):
    """An evaluation was cancelled."""


class Evaluator:
    """Scores models on held-out splits, whose files it keeps open. Close it after use.

    Args:
        tokenizer: digest of the tokenizer that wrote the shards; "" for any.
        stored_ids: exclusive upper bound of the ids in the shards; None for the number of
            `token_bytes`, which are the UTF-8 bytes of every id.
        batch_size: sequences per batch, over all processes; rounded up to a multiple of the
            devices that share a batch.
        sequences: sequences to read of each split, spread over it; None for all.
    """

    def __init__(
        self,
        step: EvaluationStep,
        layout: Layout,
        splits: Sequence[Split],
        token_bytes: Sequence[int],
        *,
        tokenizer: str = "",
        stored_ids: int | None = None,
        sequence_length: int,
        batch_size: int,
        sequences: int | None = None,
    ) -> None:
        self._step, self._layout = step, layout
        self._length, self._batch_size = sequence_length, layout.whole_batch(batch_size)
        self._files = ExitStack()
        self._splits: list[tuple[str, SequenceSpans, TokenArray, str]] = []
        for name, shards in splits:
            array = TokenArray(shards, stored_ids or len(token_bytes), tokenizer_digest=tokenizer)
            rows = plan_sequences(len(array), sequence_length, sequences)
            if not len(rows.starts):
                raise InputError(
                    f"the held-out split {name!r} has {len(array)} tokens, at least 2 are needed; "
                    "select more documents for it"
                )
            opened = self._files.enter_context(array)
            self._splits.append((name, rows, opened, rows.digest(shards)))
        self._token_bytes = jax.device_put(np.asarray(token_bytes, np.int32), layout.replicated)

    def __call__(
        self, model: Transformer, stopping: Callable[[], bool] = lambda: False
    ) -> tuple[list[MetricsRow], list[MetricsRow]]:
        """One metrics row per split, see `evaluate`, and one of `SequenceLosses`.

        Every process gets the same ones. Raises `Interrupted` if `stopping`, which is called before
        every batch, returns true.
        """

        def unless_stopped(batches: Iterator[Batch]) -> Iterator[Batch]:
            for batch in batches:
                if stopping():
                    raise Interrupted
                yield batch

        found, by_sequence = [], []
        for name, rows, array, digest in self._splits:
            batches = read_batches(rows, array.read, self._length, self._batch_size, self._layout)
            batches = unless_stopped(batches)
            row, *losses = evaluate(self._step, model, batches, self._token_bytes, name)
            nll, tokens = (each[: len(rows.starts)] for each in losses)
            found.append(row)
            by_sequence.append({"split": name, **SequenceLosses.row(digest, nll, tokens)})
        return found, by_sequence

    def close(self) -> None:
        self._files.close()


class InTrainingEvaluation:
    """Evaluates a run and generates samples. Close it after use.

    `evaluated` is the step of the last evaluation, also by earlier attempts; -1 before the first.
    """

    def __init__(self, job: TrainJob, program: Program, watch: Stopwatch, evaluated: int) -> None:
        self._job, self._watch, self.evaluated = job, watch, evaluated
        self._evaluator = Evaluator(
            program.evaluation_step,
            program.layout,
            job.splits,
            job.token_bytes,
            tokenizer=job.data.tokenizer,
            stored_ids=job.data.stored_ids,
            sequence_length=job.train.sequence_length,
            batch_size=job.train.evaluation_batch,
            sequences=job.train.evaluate_sequences,
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
        """The rows after a step, each with its kind; None when it was cancelled.

        The kinds are "evaluation", "sample" and, after the last step, "sequences".
        """
        try:
            scores, by_sequence = self._evaluator(state.eval_params, stopping)
        except Interrupted:
            return None
        rows = [("evaluation", {"step": step, **score}) for score in scores]
        if step == self._job.train.steps:
            rows += [("sequences", {"step": step, **row}) for row in by_sequence]
        if self._generator is not None:
            with self._watch.during("samples"):
                texts = self._generator(state.eval_params)
            rows += [("sample", {"step": step, **text}) for text in texts]
        self.evaluated = step
        return rows

    def close(self) -> None:
        self._evaluator.close()
