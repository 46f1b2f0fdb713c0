"""Accuracy on multiple-choice questions, by the log-likelihood of each choice's tokens.

Accuracies are those of EleutherAI's lm-evaluation-harness 0.4.13 (`lm_eval/api/task.py`,
`ConfigurableTask.process_results`): `acc` takes the choice with the largest summed log-likelihood;
`acc_norm` first divides each sum by the characters of the choice's text, `acc_bytes` by its UTF-8
bytes, which removes the bias against long choices. The first of equal choices wins.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from data.tokenizer.text_tokenizer import TextTokenizer
from models.transformer import Transformer
from pipeline.errors import InputError
from training.config.job import MetricsRow
from training.evaluate.loglikelihood import Continuation, Likelihood


@dataclass(frozen=True)
class Question:
    """One question, in ids.

    Attributes:
        context: ids before every choice; at least one, such as the BOS that begins a document.
        gold: index of the correct choice.
        sizes: number of UTF-8 bytes of each choice's text.
        characters: number of characters of each choice's text; empty where only ids are known.
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
    the context alone; trailing spaces of the context move to the choice. The document begins with
    BOS. `sizes` and `characters` count choices without the delimiter.

    Raises:
        InputError: fewer than two choices, one that is empty or no text, a `gold` that is no index
            of one, or a choice without tokens of its own.
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
    """acc and acc_bytes, their standard errors, the number of items, and chance accuracy.

    Also acc_norm where the numbers of characters are known.
    """
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
            found |= {name: float(np.mean(right)), f"{name}_stderr": _standard_error(right)}
    return found


def _standard_error(values: Sequence[bool]) -> float:
    """Standard error of the mean, from the sample variance; NaN for a single value."""
    if len(values) < 2:
        return math.nan
    return float(np.std(values, ddof=1) / math.sqrt(len(values)))
