"""Log-likelihoods of given continuations in batches, and accuracy on multiple-choice questions.

Requests are sorted by length and padded to powers of two, so only a few programs are compiled.

Accuracies are those of EleutherAI's lm-evaluation-harness 0.4.13 (`lm_eval/api/task.py`,
`ConfigurableTask.process_results`): `acc` takes the choice with the largest summed log-likelihood;
`acc_norm` first divides each sum by the characters of the choice's text, `acc_bytes` by its UTF-8
bytes, which removes the bias against long choices. The first of equal choices wins.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import models.named as hax
from data.tokenizer.text_tokenizer import TextTokenizer
from models.jax_numerics import exact_products
from models.layers.axes import BATCH, POSITION
from models.layers.norms import cast
from models.loss.next_token import score_tokens
from models.shape.config import TransformerConfig
from models.transformer import Transformer
from pipeline.errors import InputError
from training.config import TrainConfig
from training.config.job import MetricsRow
from training.cost.attention import attention_backend
from training.evaluate.evaluator import fetch
from training.sharding.layout import Layout
from training.step.train_step import Boundaries

SHORTEST = 16
_CHUNK_BYTES = 128 * 2**20


class Continuation(NamedTuple):
    """Ids of a row, and the index at which its continuation begins."""

    ids: tuple[int, ...]
    first: int


class LogLikelihood(NamedTuple):
    """Summed log-likelihood in nats, and whether every token was the most likely one."""

    nats: float
    greedy: bool


class Likelihood:
    """Scores continuations with models of one shape; compiles one program per padded length.

    Rows that are longer than the sequences of training are cut at the beginning. `batch_size` rows
    are scored at once, over all processes; it is rounded up to a multiple of the devices that share
    a batch.
    """

    def __init__(
        self,
        model: TransformerConfig,
        train: TrainConfig,
        layout: Layout,
        boundaries: Boundaries,
        *,
        batch_size: int,
    ) -> None:
        self._layout, self._batch_size = layout, layout.whole_batch(batch_size)
        self._longest = train.sequence_length
        self._step = _make_step(model, train, layout, boundaries)

    def __call__(self, model: Transformer, requests: Sequence[Continuation]) -> list[LogLikelihood]:
        """Results in the order of the requests; every process passes all requests and gets all."""
        for request in requests:
            if not 0 < request.first < len(request.ids):
                raise InputError(
                    f"expected a continuation after at least one token, got one from token "
                    f"{request.first} of {len(request.ids)}; put the end-of-document id before it"
                )
        groups = list(self._groups([_truncate(request, self._longest) for request in requests]))
        found = fetch(self._step(model, *self._place(*each)) for each in groups)
        answers: list[LogLikelihood | None] = [None] * len(requests)
        for (_, group), (nll, greedy) in zip(groups, found, strict=True):
            for row, (index, _) in enumerate(group):
                answers[index] = LogLikelihood(-float(nll[row]), bool(greedy[row]))
        return [answer for answer in answers if answer is not None]

    def _groups(
        self, requests: list[Continuation]
    ) -> Iterator[tuple[int, list[tuple[int, Continuation]]]]:
        """(padded length, (index, request) of each row) of every batch, longest first."""
        order = sorted(enumerate(requests), key=lambda pair: (-len(pair[1].ids), pair[0]))
        for start in range(0, len(order), self._batch_size):
            group = order[start : start + self._batch_size]
            # The next power of two.
            length = max(SHORTEST, 1 << (len(group[0][1].ids) - 1).bit_length())
            yield min(length, max(self._longest, SHORTEST)), group

    def _place(self, length: int, group: list[tuple[int, Continuation]]) -> tuple[jax.Array, ...]:
        tokens = np.zeros((self._batch_size, length), np.int32)
        ends = np.zeros((2, self._batch_size), np.int32)
        for row, (_, request) in enumerate(group):
            tokens[row, : len(request.ids)] = request.ids
            ends[:, row] = request.first, len(request.ids)
        own = self._layout.process_rows(self._batch_size)
        return tuple(self._layout.place(x[own], self._batch_size) for x in (tokens, *ends))


def _truncate(request: Continuation, longest: int) -> Continuation:
    """The request's last `longest` tokens; the first token is context and never scored."""
    removed = max(0, len(request.ids) - longest)
    return Continuation(request.ids[removed:], max(1, request.first - removed))


def _make_step(
    config: TransformerConfig, train: TrainConfig, layout: Layout, boundaries: Boundaries
) -> Any:
    """Jitted (model, tokens [batch, position], first, end [batch]) -> (nll, greedy) [batch]."""

    def step(
        model: Transformer, tokens: jax.Array, first: jax.Array, end: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        length = tokens.shape[1]
        # What was chosen for the training length may not fit a short row.
        of_length = dataclasses.replace(train, loss_chunks="auto", attention="auto")
        of_length = dataclasses.replace(of_length, sequence_length=length, length_schedule=())
        backend = attention_backend(config, of_length, layout.platform, layout.chip).backend
        with layout.activations(), exact_products(train.compute_dtype):
            nll, best = score_tokens(
                layout.gather_model(cast(model, jnp.dtype(train.compute_dtype))),
                hax.named(tokens, (BATCH, POSITION)),
                segment_ids=boundaries.segments(tokens),
                budget=_CHUNK_BYTES,
                forward=layout.forward(backend),
            )
        # Position i predicts token i + 1: count those whose target is in [first, end).
        target = jnp.arange(1, length + 1)[None]
        counted = (target >= first[:, None]) & (target < end[:, None])
        return (
            jnp.sum(jnp.where(counted, nll.array, 0.0), axis=1),
            jnp.all(best.array | ~counted, axis=1),
        )

    return jax.jit(step, out_shardings=layout.replicated)


class Question(NamedTuple):
    """One question, in ids: at least one of context, such as BOS; `gold` is the right choice.

    `sizes` and `characters` are those of each choice's text, in UTF-8 bytes and in characters,
    empty where only ids are known.
    """

    context: tuple[int, ...]
    choices: tuple[tuple[int, ...], ...]
    gold: int
    sizes: tuple[int, ...]
    characters: tuple[int, ...] = ()


def text_question(
    tokenizer: TextTokenizer,
    context: str,
    choices: Sequence[str],
    gold: int,
    *,
    delimiter: str = " ",
) -> Question:
    """A question from text, encoded as lm-evaluation-harness encodes it for a causal model.

    Context and choice, with `delimiter` between, are encoded together and split at the length of
    the context alone; trailing spaces of the context move to the choice. `sizes` and `characters`
    count choices without the delimiter.
    """
    texts = isinstance(choices, list | tuple) and all(isinstance(c, str) and c for c in choices)
    if not (isinstance(context, str) and texts and len(choices) >= 2):
        raise InputError(
            "expected a text as context and a list of two texts or more as choices, none empty, "
            f"found {context!r} and {choices!r}"
        )
    if type(gold) is not int or not 0 <= gold < len(choices):
        raise InputError(
            f"expected gold to be the index of a choice, 0 to {len(choices) - 1}, found {gold!r}"
        )
    bare = context.rstrip()
    between = context[len(bare) :] + delimiter
    ids, counts = tokenizer.encode_batch([bare, *(bare + between + c for c in choices)])
    alone, *whole = np.split(ids, np.cumsum(counts)[:-1])
    if any(len(row) <= len(alone) for row in whole):
        raise InputError(
            f"a choice of {list(choices)} has no tokens of its own after {bare[-40:]!r}; begin it "
            "with a space, or give another delimiter"
        )
    return Question(
        context=(tokenizer.bos_id, *alone.tolist()),
        choices=tuple(tuple(row[len(alone) :].tolist()) for row in whole),
        gold=gold,
        sizes=tuple(len(choice.encode()) for choice in choices),
        characters=tuple(len(choice) for choice in choices),
    )


def answer(
    likelihood: Likelihood, model: Transformer, questions: Sequence[Question]
) -> list[np.ndarray]:
    """Summed log-likelihood in nats of every choice: one float64 [choice] per question."""
    requests = [
        Continuation((*question.context, *choice), len(question.context))
        for question in questions
        for choice in question.choices
    ]
    found = np.array([one.nats for one in likelihood(model, requests)], np.float64)
    ends = np.cumsum([len(question.choices) for question in questions])
    return np.split(found, ends[:-1])


def accuracy(questions: Sequence[Question], answers: Sequence[np.ndarray]) -> MetricsRow:
    """acc, acc_bytes and, from the characters, acc_norm with standard errors; items and chance."""
    found: MetricsRow = {"items": len(questions)}
    found["chance"] = float(np.mean([1 / len(q.choices) for q in questions]))
    divisors = {
        "acc": [(1,) * len(q.choices) for q in questions],
        "acc_bytes": [q.sizes for q in questions],
        "acc_norm": [q.characters for q in questions],
    }
    for name, by in divisors.items():
        if all(by):
            right = [
                bool(np.argmax(sums / np.array(lengths, np.float64)) == question.gold)
                for sums, lengths, question in zip(answers, by, questions, strict=True)
            ]
            many = len(right) > 1  # of one answer there is no sample variance
            error = float(np.std(right, ddof=1) / math.sqrt(len(right))) if many else math.nan
            found |= {name: float(np.mean(right)), f"{name}_stderr": error}
    return found
