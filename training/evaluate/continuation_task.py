"""A multiple-choice task made from a held-out split: choose the passage's own continuation.

The wrong choices are continuations of other passages. The task needs no download and no random
numbers: the same tokens make the same questions on any machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from data.cache.token_array import TokenArray
from data.cache.token_shard import TokenShard, read_offsets
from pipeline.errors import InputError
from pipeline.identity.fingerprint import digest
from training.evaluate.multiple_choice import Question


@dataclass(frozen=True, kw_only=True)
class Passages:
    """The settings of the task.

    Attributes:
        name: name of the split.
        shards: shards of the split.
        items: maximum number of questions; there are no more than documents that are long enough.
        context, continuation: tokens of each part.
        choices: number of continuations to choose from.
    """

    name: str
    shards: tuple[TokenShard, ...]
    items: int = 512
    context: int = 64
    continuation: int = 16
    choices: int = 4


def continuation_questions(
    passages: Passages, token_bytes: Sequence[int], *, eos_id: int, tokenizer: str = ""
) -> list[Question]:
    """Questions about the beginnings of documents, spread evenly over the split.

    Args:
        passages: the split and the sizes of the questions.
        token_bytes: number of UTF-8 bytes of every id.
        eos_id: the EOS id, which also begins every context.
        tokenizer: digest of the tokenizer that wrote the shards; "" for any.

    Raises:
        InputError: fewer documents are long enough than there are choices, or too few of their
            continuations differ.
    """
    context, continuation, choices = passages.context, passages.continuation, passages.choices
    starts = _long_documents(passages.shards, context + continuation)
    if len(starts) < choices:
        raise InputError(
            f"the held-out split has {len(starts)} documents of at least {context + continuation} "
            f"tokens, {choices} choices need as many; set shorter passages or select more documents"
        )
    count = min(passages.items, len(starts))
    chosen = starts[np.arange(count, dtype=np.int64) * len(starts) // count]
    # Wrong choices come from the whole split, so that a few questions have as many to choose from.
    with TokenArray(passages.shards, len(token_bytes), tokenizer_digest=tokenizer) as array:
        texts = array.read(chosen, context + continuation)
        others = array.read(starts[:: max(1, len(starts) // 1024)] + context, continuation)
    sizes = np.asarray(token_bytes, np.int64)
    found = []
    for number, text in enumerate(texts):
        right = tuple(text[context:].tolist())
        wrong = _others(others, number, right, choices - 1)
        # A hash places the right choice: uniform over the indices, and the same on any machine.
        gold = int(digest(["continuation", number])[:8], 16) % choices
        offered = (*wrong[:gold], right, *wrong[gold:])
        found.append(
            Question(
                context=(eos_id, *text[:context].tolist()),
                choices=offered,
                gold=gold,
                sizes=tuple(max(1, int(sizes[list(choice)].sum())) for choice in offered),
            )
        )
    return found


def _long_documents(shards: Sequence[TokenShard], least: int) -> np.ndarray:
    """Starts of documents with at least `least` tokens before their EOS, int64 [document]."""
    found, base = [np.zeros(0, np.int64)], 0
    for shard in shards:
        offsets = read_offsets(shard.directory, shard.check)
        found.append(base + offsets[:-1][np.diff(offsets) > least])
        base += shard.tokens
    return np.concatenate(found)


def _others(
    others: np.ndarray, number: int, right: tuple[int, ...], count: int
) -> list[tuple[int, ...]]:
    """`count` continuations of other passages, all different, none of them the right one."""
    size, found = len(others), list[tuple[int, ...]]()
    # Try strides over the whole split first: neighbouring documents often have the same topic.
    strides = [(number + 1 + step * (size // (count + 1) + 1)) % size for step in range(count)]
    for index in (*strides, *range(size)):
        other = tuple(others[index].tolist())
        if other != right and other not in found:
            found.append(other)
        if len(found) == count:
            return found
    raise InputError(
        f"the held-out split has fewer than {count + 1} different continuations; set longer ones"
    )
