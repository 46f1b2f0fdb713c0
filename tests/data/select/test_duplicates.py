"""Which copies of a text go is what one loop over all documents says."""

import hashlib

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from data.select.duplicates import Part, by_share, compare, find_duplicates, join


def hashes_of(documents):
    """uint64 [documents, 3] of (text, id) pairs."""
    rows = []
    for text, name in documents:
        digest = hashlib.blake2b(bytes([text]), digest_size=16).digest()
        place = hashlib.blake2b(bytes([name]), digest_size=8).digest()
        rows.append(np.frombuffer(digest + place, "<u8"))
    return np.array(rows, np.uint64).reshape(-1, 3)


def parts_of(files):
    """A part for every (rank, documents)."""
    return [
        Part(number, rank, hashes_of(documents)) for number, (rank, documents) in enumerate(files)
    ]


def kept_by_hand(files, by_position):
    """Indices (part, row) of the copy of each text that stays."""
    best = {}
    for part, (rank, documents) in enumerate(files):
        for row, (text, name) in enumerate(documents):
            place = int(hashes_of([(text, name)])[0, 2])
            key = (rank, part, row) if by_position else (rank, place, part, row)
            best[text] = min(best.get(text, (key, (part, row))), (key, (part, row)))
    return {where for _, where in best.values()}


def kept_by(found, files):
    return {
        (part, row)
        for part, (_, documents) in enumerate(files)
        for row in range(len(documents))
        if row not in found.lost.get(part, np.empty(0, np.int64)).tolist()
    }


@settings(max_examples=60, deadline=None)
@given(
    files=st.lists(
        st.tuples(
            st.integers(0, 2),
            st.lists(st.tuples(st.integers(0, 9), st.integers(0, 12)), max_size=12),
        ),
        max_size=6,
    ),
    by_position=st.booleans(),
    shares=st.sampled_from([1, 2, 7]),
)
def test_the_copy_that_stays_is_the_one_a_loop_chooses(files, by_position, shares):
    """One copy of every text, of the lowest rank, then the smallest hash; in any shares."""
    divided = by_share(parts_of(files), shares)
    found = join(compare([share], by_position) for share in divided)
    assert kept_by(found, files) == kept_by_hand(files, by_position)
    names = [name for _, documents in files for _, name in documents]
    assert found.repeated_ids == len(names) - len(set(names))
    for rows in found.lost.values():
        assert len(rows)
        assert (np.diff(rows) > 0).all()


def test_no_documents_have_no_duplicates():
    """Neither parts nor documents are needed."""
    assert find_duplicates([], by_position=False).lost == {}
    assert find_duplicates(parts_of([(0, [])]), by_position=True).repeated_ids == 0
