"""A multiple-choice task made of held-out text at hand: which continuation is the passage's own?

The wrong choices are continuations of other passages. Nothing is downloaded and nothing is drawn at
random: the same tokens make the same questions on any machine.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from data.cache.token_array import TokenArray
from data.cache.token_shard import TokenShard, read_offsets
from pipeline.errors import InputError
from pipeline.identity.fingerprint import digest
from training.evaluate.multiple_choice import Question


def continuation_questions(
    shards: Sequence[TokenShard],
    token_bytes: Sequence[int],
    *,
    eos_id: int,
    tokenizer: str = "",
    items: int,
    context: int,
    continuation: int,
    choices: int,
) -> list[Question]:
    """Questions about the beginnings of documents, spread evenly over the set.

    Args:
        shards: of a held-out set.
        token_bytes: UTF-8 bytes of every id.
        eos_id: ends a document, and stands before every context.
        tokenizer: digest of the tokenizer that wrote the shards; "" for any.
        items: questions at most; as many as there are documents that are long enough.
        context, continuation: tokens of each part.
        choices: continuations to choose from.

    Raises:
        InputError: when there are fewer such documents than choices.
    """
    starts = _long_documents(shards, context + continuation)
    if len(starts) < choices:
        raise InputError(
            f"the held-out set has {len(starts)} documents of at least {context + continuation} "
            f"tokens, {choices} choices need as many; ask for shorter passages or more text"
        )
    count = min(items, len(starts))
    chosen = starts[np.arange(count, dtype=np.int64) * len(starts) // count]
    # The wrong choices come from all documents, so that a few questions have as many of them.
    with TokenArray(shards, len(token_bytes), tokenizer_digest=tokenizer) as array:
        passages = array.read(chosen, context + continuation)
        others = array.read(starts[:: max(1, len(starts) // 1024)] + context, continuation)
    sizes = np.asarray(token_bytes, np.int64)
    found = []
    for number, passage in enumerate(passages):
        right = tuple(passage[context:].tolist())
        wrong = _others(others, number, right, choices - 1)
        gold = int(digest(["continuation", number])[:8], 16) % choices
        offered = (*wrong[:gold], right, *wrong[gold:])
        found.append(
            Question(
                context=(eos_id, *passage[:context].tolist()),
                choices=offered,
                gold=gold,
                sizes=tuple(max(1, int(sizes[list(choice)].sum())) for choice in offered),
            )
        )
    return found


def _long_documents(shards: Sequence[TokenShard], least: int) -> np.ndarray:
    """Where documents of at least `least` tokens, without their end, begin: int64 [document]."""
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
    there, found = len(others), list[tuple[int, ...]]()
    # Strides over the whole set first: neighbours in it are often about the same thing.
    strides = [(number + 1 + step * (there // (count + 1) + 1)) % there for step in range(count)]
    for at in (*strides, *range(there)):
        other = tuple(others[at].tolist())
        if other != right and other not in found:
            found.append(other)
        if len(found) == count:
            return found
    raise InputError(
        f"the held-out set has fewer than {count + 1} different continuations; ask for longer ones"
    )
