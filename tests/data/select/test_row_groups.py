"""The walk over row groups: every one once, from both ends, in an order of names and seed alone."""

from collections import Counter
from dataclasses import asdict

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.prepare.items import stored_unit
from data.read.work_units import list_files, read_units
from data.select.row_groups import (
    BLOCK_ROW_GROUPS,
    Group,
    RowGroupOrder,
    block_units,
    join_units,
    only_group,
    survey_block,
)

COUNTS = {"a/x.parquet": 70, "a/y.parquet": 3, "b/x.parquet": 33, "b/z.parquet": 32}


def write_files(directory):
    """Files of row groups of two documents, with lengths and scores that differ."""
    for name, groups in COUNTS.items():
        rows = 2 * groups
        table = pa.table(
            {
                "id": [f"{name}-{i}" for i in range(rows)],
                "text": [f"text {i}" for i in range(rows)],
                "token_count": [1 + i % 5 for i in range(rows)],
                "score": [float(i % 3) for i in range(rows)],
            }
        )
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, directory / name, row_group_size=2)
    return [url for url, _ in list_files(f"{directory}/*/*.parquet")]


def walked(files, seed, *, backwards=False, at_once=3):
    """(name of the file, row group) in the order of a walk."""
    walk = RowGroupOrder(files, seed, backwards=backwards)
    found, blocks = [], []
    while given := walk.next_blocks(at_once):
        for block in given:
            groups, count = block_units(block, seed)
            walk.set_row_group_count(block, count)
            blocks.append(block)
            found += [(block.name, *unit.row_groups) for unit in groups]
    return found, blocks


def test_a_walk_meets_every_row_group_once_and_goes_round(tmp_path):
    """32 of each file, then the next 32 of those that have more."""
    found, blocks = walked(write_files(tmp_path), 1)
    assert sorted(found) == sorted((n, i) for n, count in COUNTS.items() for i in range(count))
    assert [block.round for block in blocks] == [0, 0, 0, 0, 1, 1, 2]
    firsts = [block.name for block in blocks[:4]]
    assert [b.name for b in blocks[4:6]] == [n for n in firsts if COUNTS[n] > BLOCK_ROW_GROUPS]
    assert blocks[6].name == "a/x.parquet"


def test_the_order_depends_on_names_and_seed_alone(tmp_path):
    """Files in another order, at another address, asked for one at a time: the same walk."""
    files = write_files(tmp_path / "here")
    there = write_files(tmp_path / "other" / "place")
    found, _ = walked(files, 1)
    assert walked(files[::-1], 1, at_once=1)[0] == found
    assert walked(there, 1)[0] == found
    assert walked(files, 2)[0] != found


def test_the_other_end_begins_with_what_comes_last(tmp_path):
    """Backwards: the last files first, each from its last row group."""
    files = write_files(tmp_path)
    _, forward = walked(files, 1)
    found, backward = walked(files, 1, backwards=True)
    assert [b.name for b in backward[:4]] == [b.name for b in forward[:4]][::-1]
    whole = {name: [] for name in COUNTS}
    for name, group in walked(files, 1)[0]:
        whole[name].append(group)
    for name in COUNTS:
        assert [group for n, group in found if n == name] == whole[name][::-1]


@pytest.mark.parametrize("min_score", [None, 2.0])
def test_a_block_is_counted_by_hand(tmp_path, min_score):
    """Documents and tokens of each row group, through JSON and back."""
    files = write_files(tmp_path)
    block = RowGroupOrder(files, 1, backwards=False).next_blocks(1)[0]
    groups, count = survey_block(block, 1, min_score)
    assert count == COUNTS[block.name]
    parquet = pq.ParquetFile(block.file)
    for group in groups:
        assert msgspec.convert(asdict(group), Group) == group
        rows = parquet.read_row_group(group.key[1]).to_pylist()
        rows = [r for r in rows if min_score is None or r["score"] >= min_score]
        assert (group.documents, group.tokens) == (
            len(rows),
            sum(row["token_count"] for row in rows),
        )
        assert group.compressed_bytes > 0
    assert {group.documents for group in groups} >= ({0, 1} if min_score else {2})


def test_one_row_group_of_what_a_step_wrote(tmp_path):
    """As of a source: its documents alone."""
    (file, *_) = write_files(tmp_path)
    unit = only_group(stored_unit(file), 2)
    (batch,) = read_units((unit,), ("id",), Counter())
    assert (unit.row_groups, unit.rows) == ((2,), 2)
    assert batch.column("id").to_pylist() == ["a/x.parquet-4", "a/x.parquet-5"]


def test_joined_units_hold_their_parts_in_order(tmp_path):
    """Neighbours of a file are one unit up to a size; another file begins another."""
    files = write_files(tmp_path)
    blocks = RowGroupOrder(files, 1, backwards=False).next_blocks(2)
    units = [unit for block in blocks for unit in block_units(block, 1)[0]]
    joined = join_units(units, target_bytes=3 * units[0].text_bytes)
    assert [g for u in joined for g in u.row_groups] == [g for u in units for g in u.row_groups]
    assert sum(u.rows for u in joined) == sum(u.rows for u in units)
    assert sum(u.text_bytes for u in joined) == sum(u.text_bytes for u in units)
    assert len({u.file for u in joined}) == 2
    assert 2 <= max(len(u.row_groups) for u in joined) <= 4


def test_files_with_one_name_in_two_places_are_two_files(tmp_path):
    """A name is taken with the directories that tell files apart, as hashes of it show."""
    files = write_files(tmp_path)
    names = [b.name for b in RowGroupOrder(files, 1, backwards=False).next_blocks(9)]
    assert sorted(names) == sorted(COUNTS)
    single = [f for f in files if f.endswith("z.parquet")]
    assert [b.name for b in RowGroupOrder(single, 1, backwards=False).next_blocks(9)] == [
        "z.parquet"
    ]
    orders = {
        tuple(np.argsort([b.name for b in RowGroupOrder(files, s, backwards=False).next_blocks(9)]))
        for s in range(20)
    }
    assert len(orders) > 5
