"""Loss and bits per byte on held-out sets: the same rows at every evaluation and on any hardware.

A set is cut into rows of one sequence, in order; the last may be shorter. An evaluation reads all
of them, or a fixed number spread evenly over the set, so that no part of it (a crawl, a file)
stands for the rest. Batches are read while the devices work on the ones before, and the host waits
for nothing but room: sums come back once, at the end. A row's sum is float32, and rows are added in
float64 by the host, so neither the batch size nor the number of devices enters the result, but for
the rounding inside a row. Every counted token weighs the same.

Bits per byte divide the summed negative log-likelihood (in bits) by the UTF-8 bytes of the
predicted tokens, so models with different tokenizers can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import jax
import numpy as np

from data.cache.token_array import TokenArray
from data.cache.token_shard import TokenShard
from models.transformer import Transformer
from pipeline.errors import InputError
from training.config.job import MetricsRow
from training.config.validation import check_sequences
from training.sharding.layout import Layout
from training.step.evaluation_step import EvaluationStep

Read = Callable[[np.ndarray, int], np.ndarray]
HeldOut = tuple[str, tuple[TokenShard, ...]]

# Batches that devices may be behind the host: enough to keep them busy, few enough to hold.
IN_FLIGHT = 4


@dataclass(frozen=True)
class SequenceSpans:
    """Rows of a set: int64 [row] each, where a row starts and how many tokens it has."""

    starts: np.ndarray
    lengths: np.ndarray


@dataclass(frozen=True)
class EvaluationBatch:
    """Tokens int32 [batch, position] and the real ones of each row, int32 [batch]; on devices."""

    tokens: jax.Array
    lengths: jax.Array


def plan_sequences(tokens: int, length: int, most: int | None = None) -> SequenceSpans:
    """The rows that an evaluation reads of a set of `tokens` tokens.

    Args:
        tokens: of the set.
        length: of a row; the last row of the set has what is left, if that is 2 or more.
        most: rows to read, spread evenly over the set; None for all of them.
    """
    sequences, left = divmod(tokens, length)
    there = sequences + (left >= 2)
    count = there if most is None else min(most, there)
    chosen = np.arange(count, dtype=np.int64) * there // max(count, 1)
    starts = chosen * length
    return SequenceSpans(starts, np.minimum(length, tokens - starts))


def read_batches(
    rows: SequenceSpans, read: Read, length: int, batch_size: int, layout: Layout
) -> Iterator[EvaluationBatch]:
    """The rows as batches of one shape, each process reading only its own rows.

    Args:
        rows: of one set.
        read: (starts int64 [n], length) -> int32 [n, length], from the set's token array.
        length: positions of a batch.
        batch_size: rows of a batch, over all processes; rows that are missing have length 0.
        layout: where the batches go.
    """
    mine = layout.process_rows(batch_size)
    for start in range(0, len(rows.starts), batch_size):
        part = start + mine[mine < len(rows.starts) - start]
        starts, sizes = rows.starts[part], rows.lengths[part]
        tokens, lengths = np.zeros((len(mine), length), np.int32), np.zeros(len(mine), np.int32)
        lengths[: len(sizes)] = sizes
        for size in np.unique(sizes).tolist():
            (at,) = np.nonzero(sizes == size)
            tokens[at, :size] = read(starts[at], size)
        yield EvaluationBatch(layout.place(tokens, batch_size), layout.place(lengths, batch_size))


def evaluate(
    step: EvaluationStep,
    model: Transformer,
    batches: Iterable[EvaluationBatch],
    token_bytes: jax.Array,
) -> MetricsRow:
    """Mean loss in nats per token, bits_per_byte, and the tokens and bytes they are over.

    There is no bits_per_byte where the predicted tokens have no bytes at all.
    """
    sums: list[tuple[jax.Array, jax.Array, jax.Array]] = []
    for batch in batches:
        if len(sums) >= IN_FLIGHT:
            jax.block_until_ready(sums[-IN_FLIGHT])
        sums.append(step(model, batch.tokens, batch.lengths, token_bytes))
    parts = jax.device_get(sums)
    nll, tokens, size = (
        sum(np.sum(part[i], dtype=kind).item() for part in parts)
        for i, kind in enumerate((np.float64, np.int64, np.int64))
    )
    return {
        "loss": nll / tokens,
        **({"bits_per_byte": nll / math.log(2) / size} if size else {}),
        "tokens": tokens,
        "bytes": size,
    }


class Interrupted(Exception):
    """An evaluation was asked to leave before its end."""


def _while_not(
    stopping: Callable[[], bool], batches: Iterable[EvaluationBatch]
) -> Iterator[EvaluationBatch]:
    for batch in batches:
        if stopping():
            raise Interrupted
        yield batch


class Evaluator:
    """Held-out sets, open, and what it takes to score a model on them. Close it after use.

    Args:
        step: see `make_evaluation_step`; it is compiled at the first call.
        layout: where batches go.
        held_out: name and shards of each set.
        token_bytes: UTF-8 bytes of every id.
        tokenizer: digest of the tokenizer that wrote the shards; "" for any.
        stored_ids: what ids in the shards are below; None for the number of `token_bytes`.
        sequence_length: of a row.
        batch_size: rows at once, over all processes.
        sequences: rows of a set that are read, spread over it; None for all.

    Raises:
        InputError: a set has fewer than two tokens, no rows of it are to be read, or the batch does
            not spread over the devices.
    """

    def __init__(
        self,
        step: EvaluationStep,
        layout: Layout,
        held_out: Sequence[HeldOut],
        token_bytes: Sequence[int],
        *,
        tokenizer: str = "",
        stored_ids: int | None = None,
        sequence_length: int,
        batch_size: int,
        sequences: int | None = None,
    ) -> None:
        check_sequences(sequences)
        if batch_size % layout.batch_shards:
            raise InputError(
                f"evaluate_batch_size: {batch_size} rows do not spread over {layout.batch_shards} "
                "devices; choose a multiple of that"
            )
        self._step, self._layout = step, layout
        self._length, self._batch_size = sequence_length, batch_size
        self._files = ExitStack()
        self._sets: list[tuple[str, SequenceSpans, TokenArray]] = []
        for name, shards in held_out:
            array = TokenArray(shards, stored_ids or len(token_bytes), tokenizer_digest=tokenizer)
            rows = plan_sequences(len(array), sequence_length, sequences)
            if not len(rows.starts):
                raise InputError(
                    f"the held-out set {name!r} has {len(array)} tokens, at least 2 are needed; "
                    "ask for more of them"
                )
            self._sets.append((name, rows, self._files.enter_context(array)))
        self._token_bytes = jax.device_put(np.asarray(token_bytes, np.int32), layout.replicated)

    def __call__(
        self, model: Transformer, stopping: Callable[[], bool] = lambda: False
    ) -> list[MetricsRow]:
        """A row a set: its name, loss, bits_per_byte, tokens and bytes, see `evaluate`.

        Every process calls this with the same model and gets the same rows.

        Args:
            model: parameters on the layout.
            stopping: asked before every batch whether to leave.

        Raises:
            Interrupted: it returned true.
        """
        found = []
        for name, rows, array in self._sets:
            batches = read_batches(rows, array.read, self._length, self._batch_size, self._layout)
            going = _while_not(stopping, batches)
            found.append({"set": name, **evaluate(self._step, model, going, self._token_bytes)})
        return found

    def close(self) -> None:
        """Close the sets' files."""
        self._files.close()
