"""Packing keeps every token, cuts only what is longer than a row, and is best-fit decreasing."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.batches.packing import (
    documents_cut_by_joining,
    documents_cut_by_packing,
    fill,
    pack,
    rows_of_next_fit,
)
from pipeline.errors import InputError

EOS = 0
SIZES = st.lists(st.integers(1, 60) | st.integers(1, 12), max_size=60)
LENGTH = st.integers(2, 24)


def offsets_of(sizes):
    return np.cumsum([0, *sizes])


def documents_of(sizes):
    """Ids that say which document and where in it; EOS ends each."""
    return [[100 * (n + 1) + i for i in range(size - 1)] + [EOS] for n, size in enumerate(sizes)]


def stream_of(sizes):
    return np.array([token for document in documents_of(sizes) for token in document], np.int32)


def rows_of(sizes, length):
    tokens = stream_of(sizes)
    packing = pack(offsets_of(sizes), length)
    return packing, fill(packing, tokens, length, EOS)


def naive_best_fit(sizes, length):
    """Bins as sets of items; by looking at every bin for every item."""
    bins = []  # [room, when it came to have it, items]
    for when, item in enumerate(sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))):
        fitting = [b for b in bins if b[0] >= sizes[item]]
        if fitting:
            chosen = min(fitting, key=lambda b: (b[0], -b[1]))
        else:
            chosen = [length, when, []]
            bins.append(chosen)
        chosen[0] -= sizes[item]
        chosen[1] = when
        chosen[2].append(item)
    return {frozenset(items) for _, _, items in bins}


@settings(max_examples=80, deadline=None)
@given(sizes=SIZES, length=LENGTH)
def test_every_token_is_kept_in_its_documents_order(sizes, length):
    """From the rows alone: cut at padding, the pieces of each document join to the document."""
    packing, rows = rows_of(sizes, length)
    assert rows.shape == (packing.row_count, length)
    found = {n: [] for n in range(len(sizes))}
    for start, size, row in zip(*packing[:3], strict=True):
        document = int(np.searchsorted(offsets_of(sizes), start, side="right")) - 1
        assert start + size <= offsets_of(sizes)[document + 1]
        found[document].append((start, size, row))
    for document, pieces in found.items():
        joined = sorted(pieces)
        assert sum(size for _, size, _ in joined) == sizes[document]
        # Whole rows, then one remainder: never more pieces than it needs with the EOS in front.
        assert len(joined) == -(-(sizes[document] + 1) // length)
    text = [token for row in rows.tolist() for token in row if token != EOS]
    wanted = [token for document in documents_of(sizes) for token in document if token != EOS]
    assert sorted(text) == wanted
    assert (rows == EOS).sum() == rows.size - len(wanted)


@settings(max_examples=80, deadline=None)
@given(sizes=SIZES, length=LENGTH)
def test_a_row_is_whole_documents_or_one_full_piece(sizes, length):
    """Without EOS at its end a piece is a row; others stand in document order, padding after. In
    front of each document's first token is an EOS."""
    packing, rows = rows_of(sizes, length)
    ends = set(offsets_of(sizes)[1:].tolist())
    begins, stream = set(offsets_of(sizes)[:-1].tolist()), stream_of(sizes)
    assert sorted(set(packing.rows.tolist())) == list(range(packing.row_count))
    assert (np.diff(packing.rows) >= 0).all()
    lasts = []
    for row in range(packing.row_count):
        mine = packing.rows == row
        starts, sizes_here = packing.starts[mine], packing.lengths[mine]
        assert (np.diff(starts) > 0).all()
        if any(int(s + n) not in ends for s, n in zip(starts, sizes_here, strict=True)):
            assert sizes_here.tolist() == [length - (int(starts[0]) in begins)]
        pieces = [stream[s : s + n] for s, n in zip(starts, sizes_here, strict=True)]
        content = np.concatenate([[EOS] * (int(starts[0]) in begins), *pieces]).astype(int)
        assert rows[row, : len(content)].tolist() == content.tolist()
        assert (rows[row, len(content) :] == EOS).all()
        firsts = [at for at, token in enumerate(rows[row].tolist()) if token and token % 100 == 0]
        assert all(at and rows[row, at - 1] == EOS for at in firsts)
        lasts.append(starts[-1])
    assert (np.diff(lasts) > 0).all()
    if packing.row_count:
        assert rows[-1, -1] == EOS
    assert packing.fronts == len(
        set(packing.rows.tolist()) - set(packing.rows[packing.places == 0])
    )


@settings(max_examples=80, deadline=None)
@given(sizes=st.lists(st.integers(1, 22), max_size=50))
def test_rows_are_those_of_best_fit_decreasing(sizes):
    """The same sets of documents share rows as when every row is looked at for every document."""
    packing = pack(offsets_of(sizes), 24)
    documents = np.searchsorted(offsets_of(sizes), packing.starts)
    found = {frozenset(documents[packing.rows == row].tolist()) for row in range(packing.row_count)}
    assert found == naive_best_fit(sizes, 23)


@settings(max_examples=80, deadline=None)
@given(sizes=SIZES, length=LENGTH)
def test_counts_agree_with_counting(sizes, length):
    """Documents cut and rows of next fit, token by token."""
    offsets = offsets_of(sizes)
    joined = sum(
        len({place // length for place in range(a, b)}) > 1 for a, b in itertools.pairwise(offsets)
    )
    assert documents_cut_by_joining(offsets, length) == joined
    packing = pack(offsets, length)
    documents = np.searchsorted(offsets, packing.starts, side="right")
    assert documents_cut_by_packing(offsets, length) == (np.bincount(documents) > 1).sum()
    rows = []
    for size in sizes:
        whole, rest = divmod(size + 1, length)
        rows += [length] * whole
        if rest := rest if whole else size:
            rows.append(rest)
    naive, room = 0, 0
    for piece in rows:
        if piece == length:
            naive += 1
        elif piece > room:
            naive, room = naive + 1, length - 1 - piece
        else:
            room -= piece
    assert rows_of_next_fit(offsets, length) == naive


def test_a_small_packing():
    """Rows of 8: with the EOS in front, a document of 19 gives two rows and a remainder of 4."""
    packing, rows = rows_of([5, 19, 7, 2], 8)
    assert rows.tolist() == [
        [EOS, 200, 201, 202, 203, 204, 205, 206],
        [207, 208, 209, 210, 211, 212, 213, 214],
        [215, 216, 217, EOS, EOS, EOS, EOS, EOS],
        [EOS, 300, 301, 302, 303, 304, 305, EOS],
        [EOS, 100, 101, 102, 103, EOS, 400, EOS],
    ]
    assert (packing.row_count, packing.fronts) == (5, 3)


def test_nothing_gives_nothing():
    """No documents, no rows."""
    packing, rows = rows_of([], 8)
    assert packing.row_count == 0
    assert rows.shape == (0, 8)


def test_rows_of_one_token_are_refused():
    """An EOS in front leaves no place for the document."""
    with pytest.raises(InputError, match="length=1"):
        pack(np.array([0, 1]), 1)
