"""Rows of conversations: what is in them, by hand and by laws."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.chat.encoder import Encoded
from data.chat.rows import CUT, TRUNCATED, UNPREDICTED, WHOLE, pack_rows, shortened

VOCAB, LENGTH = 50, 12


def chat(text: str, first: int = 0) -> Encoded:
    """A conversation: "P" is a predicted token, any other character is read only."""
    ids = np.arange(first, first + len(text), dtype=np.int64) % VOCAB
    return Encoded(ids, np.array([c == "P" for c in text], bool))


@pytest.mark.parametrize(
    ("text", "left", "what"),
    [
        ("..PP", "..PP", WHOLE),
        ("..PP..PP....", "..PP..PP....", WHOLE),
        ("..PP...PPP..PP", "..PP...PPP", CUT),
        ("..PP.......PPP", "..PP", CUT),
        ("......PPPPPPPP", "......PPPPPP", TRUNCATED),
        ("......PPPPPP.P", "......PPPPPP", CUT),
        ("............PP", "............", UNPREDICTED),
        ("P...", "....", UNPREDICTED),
        ("PP..", ".P..", WHOLE),
    ],
)
def test_a_long_conversation_ends_with_a_turn(text, left, what):
    """If one ends in the row; else it is truncated. The first token is never predicted."""
    found, became = shortened(chat(text), LENGTH)
    assert became == what
    assert "".join("P" if p else "." for p in found.predicted) == left
    assert found.ids.tolist() == list(range(len(left)))


def taken_apart(rows: np.ndarray) -> list[list[tuple[int, bool]]]:
    """The segments of all rows as (id, predicted); each begins with an id of the third band."""
    found = []
    for row in rows.tolist():
        assert row[0] >= 2 * VOCAB
        for stored in row:
            if stored >= 2 * VOCAB:
                found.append([])
            found[-1].append((stored % VOCAB, stored < VOCAB))
    return found


CHATS = st.lists(st.text("P.", min_size=2, max_size=LENGTH), max_size=30)


@given(CHATS, st.integers(0, VOCAB - 1))
def test_each_conversation_is_one_segment_of_one_row(texts, first):
    """Nothing is lost, added or divided; the rest of a row is a segment that predicts nothing.

    By best fit, no two rows could be one.
    """
    chats = [chat("." + text[1:], first + place) for place, text in enumerate(texts)]
    rows = pack_rows(chats, LENGTH, VOCAB)
    assert rows.shape[1] == LENGTH
    segments = taken_apart(rows)
    wanted = [list(zip(c.ids.tolist(), c.predicted.tolist(), strict=True)) for c in chats]
    padding = [segment for segment in segments if not any(p for _, p in segment)]
    for conversation in wanted:
        segments.remove(conversation)
    assert all(segment in padding and {i for i, _ in segment} == {0} for segment in segments)
    assert len(segments) <= len(rows)
    assert all(len(one) + len(other) < LENGTH for one, other in combinations(segments, 2))
    assert sum(map(len, wanted)) + sum(map(len, segments)) == rows.size


def test_no_conversation_gives_no_row():
    """An empty part of a split is a shard without tokens."""
    assert pack_rows([], LENGTH, VOCAB).shape == (0, LENGTH)
