"""Rows of integers: every value against plain Python, splits that share no row, bad rows named."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.read.integer_rows import RowFormat, RowSpan, divide, list_spans, read_rows
from pipeline.errors import InputError

VOCAB, LENGTH = 10, 6
LAYOUT = RowFormat(column="ids", mask_column="mask", length=LENGTH, vocab_size=VOCAB, padding=9)
ROWS = st.lists(
    st.lists(st.tuples(st.integers(0, VOCAB - 1), st.booleans()), max_size=LENGTH),
    min_size=1,
    max_size=20,
)


def write(path, ids, masks, group=7):
    """A Parquet file of these rows."""
    table = pa.table(
        {"ids": pa.array(ids, pa.list_(pa.int16())), "mask": pa.array(masks, pa.list_(pa.int8()))}
    )
    pq.write_table(table, path, row_group_size=group)
    return str(path)


@settings(max_examples=40, deadline=None)
@given(ROWS)
def test_rows_are_what_the_file_has(tmp_path_factory, rows):
    """Masked ids, the padding id and the missing end are stored above the vocabulary."""
    path = tmp_path_factory.mktemp("rows") / "x.parquet"
    url = write(
        path, [[i for i, _ in row] for row in rows], [[int(m) for _, m in row] for row in rows]
    )
    found = [
        row.tolist()
        for span in list_spans(url, LAYOUT)
        for batch in read_rows(span, LAYOUT)
        for row in batch
    ]
    expected = [
        [i if n and m and i != 9 else i + VOCAB for n, (i, m) in enumerate(row)]
        + [VOCAB] * (LENGTH - len(row))
        for row in rows
    ]
    assert found == expected


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=12),
    st.integers(0, 20),
    st.integers(0, 20),
    st.randoms(),
)
def test_every_row_is_in_one_split_and_each_has_what_was_asked(sizes, validation, test, random):
    """Splits are disjoint, and together they are the source."""
    spans = [RowSpan(file="f", row_group=i, begin=0, end=n) for i, n in enumerate(sizes)]
    order = list(range(len(spans)))
    random.shuffle(order)
    asked = (("validation", validation), ("test", test))
    if validation + test >= sum(sizes):
        with pytest.raises(InputError, match="fewer held-out rows"):
            divide(spans, order, asked)
        return
    found = divide(spans, order, asked)
    rows = {
        split: [(s.row_group, r) for s in parts for r in range(s.begin, s.end)]
        for split, parts in found.items()
    }
    assert {split: len(rows[split]) for split, _ in asked} == dict(asked)
    every = [row for split in rows.values() for row in split]
    assert sorted(every) == [(i, r) for i, n in enumerate(sizes) for r in range(n)]


@pytest.mark.parametrize(
    ("ids", "masks", "named"),
    [
        ([[1], [1] * 7], [[1], [1] * 7], "row 1: expected at most sequence_length=6 ids, found 7"),
        (
            [[1], [2, 10]],
            [[1], [1, 1]],
            "row 1: expected ids from 0 to vocab_size - 1 = 9, found 10",
        ),
        ([[-1]], [[1]], "row 0: expected ids from 0"),
        ([[1], [2]], [[1], [1, 1]], "row 1: expected 1 entries in 'mask'"),
        ([[1], None], [[1], [1]], "row 1: found a null in 'ids'"),
        ([[1, None]], [[1, 1]], "found a null in 'ids'"),
    ],
)
def test_bad_rows_are_named(tmp_path, ids, masks, named):
    """One line with the row and what was expected."""
    url = write(tmp_path / "x.parquet", ids, masks)
    with pytest.raises(InputError, match=named.replace("(", r"\(")):
        list(read_rows(list_spans(url, LAYOUT)[0], LAYOUT))


def test_a_column_of_text_is_refused(tmp_path):
    """The columns there are, are named."""
    path = str(tmp_path / "x.parquet")
    pq.write_table(pa.table({"ids": ["a"], "mask": [[1]]}), path)
    with pytest.raises(InputError, match="column 'ids' of lists of integers, found string"):
        list_spans(path, LAYOUT)


@pytest.mark.parametrize("kind", [pa.uint64(), pa.int8(), pa.int64()])
def test_an_id_of_any_integer_type_is_an_id(tmp_path, kind):
    """And one beyond int64 is out of range like any other."""
    path, layout = str(tmp_path / "x.parquet"), replace(LAYOUT, mask_column=None, vocab_size=300)
    pq.write_table(pa.table({"ids": pa.array([[5, 3, 9]], pa.list_(kind))}), path)
    (found,) = (b for span in list_spans(path, layout) for b in read_rows(span, layout))
    assert found.tolist() == [[305, 3, 309, 300, 300, 300]]
    if kind == pa.uint64():
        pq.write_table(pa.table({"ids": pa.array([[1], [1, 2**63 + 5]], pa.list_(kind))}), path)
        (span,) = list_spans(path, layout)
        with pytest.raises(InputError, match=rf"x\.parquet: .* row 1: .* found {2**63 + 5}"):
            list(read_rows(span, layout))


def test_two_joined_files_are_refused(tmp_path):
    """The footer is that of the second, and the first one's bytes are where it looks."""
    path = tmp_path / "x.parquet"
    write(path, [[1]], [[1]])
    path.write_bytes(path.read_bytes() * 2)
    with pytest.raises(InputError, match=r"x\.parquet: .* two, of which the second begins"):
        list_spans(str(path), LAYOUT)
