"""Sources are cut into units without losing a row, and what is wrong is named."""

import dataclasses
import json
import math
import random

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.read import work_units
from data.read.unit import SCORE, Fields
from pipeline.errors import InputError

WORDS = ("water", "stone", "the", "of", "a", "ångström", "北京", "wind")


def rows(count, start=0):
    numbers = random.Random(start)
    texts = [" ".join(numbers.choices(WORDS, k=numbers.randrange(1, 40))) for _ in range(count)]
    return pa.table(
        {
            "id": [f"doc-{start + i}" for i in range(count)],
            "text": texts,
            "token_count": pa.array([len(t) // 4 for t in texts], pa.int64()),
            "score": [1.0] * count,
        }
    )


@pytest.fixture
def folder(tmp_path):
    """Three files of 500 rows in row groups of 100."""
    for index in (2, 0, 1):
        pq.write_table(rows(500, 500 * index), tmp_path / f"{index}.parquet", row_group_size=100)
    return tmp_path


def read_all(units, columns):
    own = [SCORE if name == "score" else name for name in columns]
    batches = [b for unit in units for b in work_units.read_unit(unit, own)]
    return pa.Table.from_batches(batches).rename_columns(list(columns))


@pytest.mark.parametrize("target", [1, 20_000, 1 << 30])
def test_units_cover_every_row_once_and_in_order(folder, target):
    """Whatever the size of a unit, reading all of them is reading the files."""
    units = work_units.list_units(f"{folder}/*.parquet", target_bytes=target)
    expected = pa.concat_tables([rows(500, 0), rows(500, 500), rows(500, 1000)])
    for columns in (["id", "text", "token_count"], ["id"], ["token_count", "id"]):
        assert read_all(units, columns).equals(expected.select(columns))
    assert sum(unit.rows for unit in units) == 1500
    assert len(units) == {1: 15, 1 << 30: 3}.get(target, len(units))


def test_a_unit_ends_at_the_row_group_that_reaches_the_target(folder):
    """Units hold the target or are the last of their file, and are minimal."""
    target = 20_000
    for unit in work_units.list_units(f"{folder}/*.parquet", target_bytes=target):
        metadata = pq.ParquetFile(unit.file).metadata
        sizes = [metadata.row_group(g).column(1).total_uncompressed_size for g in unit.row_groups]
        assert unit.text_bytes == sum(sizes)
        assert sum(sizes[:-1]) < target
        assert sum(sizes) >= target or unit.row_groups[-1] == metadata.num_row_groups - 1


def test_another_filesystem_reads_the_same(folder):
    """Files in an object store (fsspec's memory here) are listed by URL and read by range."""
    store = fsspec.filesystem("memory")
    for path in folder.iterdir():
        store.pipe_file(f"/source-test/{path.name}", path.read_bytes())
    units = work_units.list_units("memory://source-test/*.parquet")
    assert [unit.file.split("://")[0] for unit in units] == ["memory"] * 3
    local = work_units.list_units(f"{folder}/*.parquet")
    assert read_all(units, ["id", "text"]).equals(read_all(local, ["id", "text"]))


def test_integer_ids_and_large_strings_become_strings(tmp_path):
    """Ids and texts have one type downstream."""
    table = pa.table({"id": [7, 8], "text": pa.array(["a", "b"], pa.large_string())})
    pq.write_table(table, tmp_path / "x.parquet")
    found = read_all(work_units.list_units(str(tmp_path / "x.parquet")), ["id", "text"])
    assert found.to_pylist() == [{"id": "7", "text": "a"}, {"id": "8", "text": "b"}]


def test_one_text_column_serves_as_its_own_id(tmp_path):
    """Text and id may be the same column."""
    source = str(tmp_path / "x.parquet")
    pq.write_table(pa.table({"text": ["a", "b"]}), source)
    found = read_all(work_units.list_units(source, Fields(id="text")), ["id", "text"])
    assert found["id"].to_pylist() == found["text"].to_pylist() == ["a", "b"]


@pytest.mark.parametrize("column", ["text", "id"])
def test_a_null_is_named_by_file_row_group_and_row(tmp_path, column):
    """A row without text or id is refused with its address, in any batch of the row group."""
    columns = {"id": [str(i) for i in range(6000)], "text": ["t"] * 6000}
    columns[column][5] = "x"
    columns[column][4500] = None
    pq.write_table(pa.table(columns), tmp_path / "x.parquet", row_group_size=3000)
    units = work_units.list_units(str(tmp_path / "x.parquet"))
    with pytest.raises(InputError, match=r"x\.parquet: row group 1, row 1500 .*" + repr(column)):
        read_all(units, ["id", "text", "token_count"])


@pytest.mark.parametrize("count", [-1, 1000, 1 << 62])
def test_an_impossible_count_is_refused(tmp_path, count):
    """Below zero, or more tokens than there are bytes of text, would corrupt every budget."""
    table = pa.table({"id": ["a", "b"], "text": ["a", "b"], "token_count": [3, count]})
    pq.write_table(table, tmp_path / "x.parquet")
    with pytest.raises(InputError, match=rf"row 1 .*'token_count' of 0 to .*found {count:,};"):
        read_all(work_units.list_units(str(tmp_path / "x.parquet")), ["token_count"])


@pytest.mark.parametrize("name", ["x.parquet", "x.jsonl"])
def test_a_count_that_its_text_cannot_have_is_refused_when_the_text_is_read(tmp_path, name):
    """However much text is around it; U+FDFA is three bytes, and 33 after NFKC."""
    texts = ["short", "\ufdfa" * 100, "x" * 100_000, "", "y"]
    counts = [119, 3_364, 50_000, 64, 10_000]
    rows = [
        {"id": str(n), "text": t, "token_count": c}
        for n, (t, c) in enumerate(zip(texts, counts, strict=True))
    ]
    if name == "x.parquet":
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / name)
    else:
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    units = work_units.list_units(str(tmp_path / name))
    assert read_all(units, ["id", "token_count"])["token_count"].to_pylist() == counts
    with pytest.raises(
        InputError,
        match=r"(row 4 .*|line at byte [\d,]+): expected .* of 0 to 75, found 10,000;",
    ):
        read_all(units, ["text", "token_count"])


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"body": ["a"], "id": ["a"]}, ["'text'", "body", "text="]),
        ({"text": [1], "id": ["a"]}, ["'text'", "int64"]),
        ({"text": ["a"], "id": [1.5]}, ["'id'", "double"]),
        ({"text": [b"a"], "id": ["a"]}, ["'text'", "binary"]),
        ({"text": ["a"], "id": ["a"], "token_count": [1.5]}, ["'token_count'", "double"]),
    ],
)
def test_a_wrong_schema_is_named(tmp_path, columns, words):
    """The message has the file, the column and what was found."""
    pq.write_table(pa.table(columns), tmp_path / "x.parquet")
    with pytest.raises(InputError, match=r"x\.parquet") as error:
        work_units.list_units(str(tmp_path / "x.parquet"))
    assert all(word in str(error.value) for word in words)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["float32", "float64", "float16", "int8", "uint64", "int64"])
def test_a_score_of_any_number_reads_as_a_double(tmp_path, kind):
    """Also one that no double holds to the last digit."""
    values = [0, 3, 1 << 62 if kind in ("uint64", "int64") else 5]
    column = pa.array(np.array(values, kind))
    pq.write_table(rows(3).set_column(3, "quality", column), tmp_path / "x.parquet")
    (unit,) = work_units.list_units(str(tmp_path / "x.parquet"), Fields(score="quality"))
    assert unit.score == "quality"
    found = read_all([unit], ["score", "id"])
    assert found.schema.field("score").type == pa.float64()
    assert found["score"].to_pylist() == [float(v) for v in values]


@pytest.mark.parametrize("column", [None, ["a", "b"], [True, False]])
def test_a_score_that_is_not_there_is_refused_when_asked_for(tmp_path, column):
    """A file without numbers to score by is a good source, but not for a score."""
    table = rows(2).drop_columns(["score"])
    if column:
        table = table.append_column("score", [column])
    pq.write_table(table, tmp_path / "x.parquet")
    (unit,) = work_units.list_units(str(tmp_path / "x.parquet"))
    assert unit.score is None
    assert read_all([unit], ["id"]).num_rows == 2
    with pytest.raises(InputError, match=r"x\.parquet: .*score="):
        read_all([unit], ["id", "score"])


def test_a_null_score_is_named_and_nan_is_passed_on(tmp_path):
    """As any null; what is not a number is a value."""
    table = rows(2).set_column(3, "score", pa.array([math.nan, 1.0]))
    pq.write_table(table, tmp_path / "x.parquet")
    found = read_all(work_units.list_units(str(tmp_path / "x.parquet")), ["score"])
    assert math.isnan(found["score"][0].as_py())
    pq.write_table(rows(2).set_column(3, "score", pa.array([2.0, None])), tmp_path / "y.parquet")
    with pytest.raises(InputError, match=r"y\.parquet: row group 0, row 1 .*'score'"):
        read_all(work_units.list_units(str(tmp_path / "y.parquet")), ["score"])


def test_fewer_rows_than_the_unit_has_are_refused(folder):
    """What the footer promised is what is read."""
    (unit,) = work_units.list_units(f"{folder}/1.parquet")
    with pytest.raises(InputError, match=r"row groups 0 to 4: expected 501 rows, found 500"):
        read_all([dataclasses.replace(unit, rows=501)], ["id"])


def test_a_flipped_bit_in_a_name_is_refused(tmp_path):
    """Else a file would seem to have no token counts, and others would be made up."""
    pq.write_table(rows(5), tmp_path / "x.parquet", store_schema=False)
    data = (tmp_path / "x.parquet").read_bytes()
    place = data.rindex(b"token_count")
    assert data.count(b"token_count") == 2
    for at in (place, data.index(b"token_count")):
        (tmp_path / "x.parquet").write_bytes(data[:at] + b"u" + data[at + 1 :])
        with pytest.raises(InputError, match="'uoken_count'"):
            work_units.list_units(str(tmp_path / "x.parquet"))


def test_a_glob_that_matches_nothing_and_files_without_rows(tmp_path):
    """No file and no row are both refused, with the glob."""
    with pytest.raises(InputError, match=r"nothing-\*\.parquet"):
        work_units.list_units(f"{tmp_path}/nothing-*.parquet")
    pq.write_table(rows(1).slice(0, 0), tmp_path / "x.parquet")
    with pytest.raises(InputError, match="0 rows"):
        work_units.list_units(f"{tmp_path}/*.parquet")
