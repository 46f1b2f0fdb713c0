"""A survey is a count by hand, whatever the parts; samples written are the documents selected."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.read.parquet_table import read_table
from data.read.work_units import list_units
from data.select.document_hash import document_hash
from data.select.hash_histogram import BINS, documents_in, merge, survey
from data.select.hash_ranges import Ranges
from data.select.write_sample import below, drop_rows, read_hashes, sample_units

SCHEMA = ("id", "text", "token_count")


def write_documents(directory, files=2, rows=1000, group=100):
    """Documents in `files` files: every tenth of white space alone, with scores 0, 1, ..., 4."""
    for index in range(files):
        ids = [f"<urn:uuid:{index}-{i}>" for i in range(rows)]
        texts = [" \n" if i % 10 == 0 else f"ä document {i} " * (i % 7 + 1) for i in range(rows)]
        scores = [float(i % 5) if i % 50 != 3 else float("nan") for i in range(rows)]
        counts = [len(t) // 4 for t in texts]
        table = pa.table({"id": ids, "text": texts, "token_count": counts, "score": scores})
        pq.write_table(table, directory / f"{index}.parquet", row_group_size=group)
    return f"{directory}/*.parquet"


@pytest.fixture
def units(tmp_path):
    return list_units(write_documents(tmp_path), target_bytes=20_000)


def rows_of(units):
    """Every document of some units, by another reader."""
    for unit in units:
        yield from pq.ParquetFile(unit.file).read_row_groups(list(unit.row_groups)).to_pylist()


@pytest.mark.parametrize("min_score", [None, 3.0])
def test_a_survey_is_a_count_by_hand(units, min_score):
    """Merged surveys equal one pass over all rows in Python; a score that is none is too low."""
    assert len(units) > 4
    found = merge(survey([unit], 3, min_score)[0] for unit in units)
    together, _ = survey(units, 3, min_score)
    tokens, documents = np.zeros(BINS, np.int64), np.zeros(BINS, np.int64)
    for row in rows_of(units):
        if min_score is None or row["score"] >= min_score:
            place = int(document_hash([row["id"]], 3)[0]) >> 48
            tokens[place] += row["token_count"]
            documents[place] += 1
    for counted in (found, together):
        assert np.array_equal(counted.tokens_by_bin, tokens)
        assert np.array_equal(counted.documents_by_bin, documents)
        assert (counted.seen, counted.documents) == (2000, documents.sum())
        assert counted.tokens == tokens.sum()
        assert counted.text_bytes == sum(unit.text_bytes for unit in units)
    assert documents.sum() == (2000 if min_score is None else 2 * (400 - 20))
    assert merge([]).documents == 0


def test_documents_in_bins_are_those_of_the_bins(units):
    """A look at a survey's documents finds all of the bins it is asked for, and no other."""
    counted, documents = survey(units, 1)
    bins = np.flatnonzero(counted.documents_by_bin)[::7]
    expected = []
    for row in rows_of(units):
        place = int(document_hash([row["id"]], 1)[0])
        if place >> 48 in set(bins.tolist()):
            expected.append((place, row["token_count"]))
    found = documents_in(documents, bins)
    assert sorted(zip(*found.tolist(), strict=True)) == sorted(expected)
    assert found.dtype == np.uint64
    assert len(expected) > 100


def expected_of(unit, ranges, seed, min_score):
    """The split of each row of a unit or the reason why it has none, by one loop."""
    for row in rows_of([unit]):
        place = int(document_hash([row["id"]], seed)[0])
        hits = [name for name, first, last in ranges.splits if first <= place <= last]
        if min_score is not None and not row["score"] >= min_score:
            yield row, below(min_score)
        elif not hits:
            yield row, "outside the ranges"
        elif not row["text"].strip():
            yield row, "empty text"
        else:
            yield row, hits[0]


@pytest.mark.parametrize("min_score", [None, 2.0])
def test_sampled_files_are_the_selected_documents(units, tmp_path, min_score):
    """Each split has its documents in source order; every document is accounted for."""
    eighth = 1 << 61
    ends = {"train": (0, 2 * eighth - 1), "validation": (7 * eighth, 8 * eighth - 1)}
    ends["extra"] = 6 * eighth, 7 * eighth - 1
    ranges = Ranges(splits=tuple((name, *where) for name, where in ends.items()))
    written = 0
    for index, unit in enumerate(units):
        out = tmp_path / "out" / str(index)
        found = sample_units(
            [unit], ranges, str(out), seed=7, min_score=min_score, keep_hashes=True
        )
        places = {}
        for row, where in expected_of(unit, ranges, 7, min_score):
            places.setdefault(where, []).append({name: row[name] for name in SCHEMA})
        dropped = {reason: len(places.pop(reason, [])) for reason in found["dropped"]}
        assert found["dropped"] == dropped
        assert set(found["splits"]) == set(places) == {p.stem for p in out.glob("*.parquet")}
        assert found["seen"] == sum(dropped.values()) + sum(map(len, places.values()))
        for name, documents in places.items():
            table = pa.Table.from_batches(read_table(str(out / f"{name}.parquet")))
            assert table.schema.names == list(SCHEMA)
            assert table.to_pylist() == documents
            counts = found["splits"][name]
            assert counts["documents"] == len(documents)
            assert counts["tokens"] == sum(row["token_count"] for row in documents)
            assert counts["bytes"] == sum(len(row["text"].encode()) for row in documents)
            ids = document_hash([row["id"] for row in documents], 7)
            assert np.array_equal(read_hashes(str(out), name)[:, 2], ids)
        written += sum(map(len, places.values()))
    assert written > 300


def test_the_digest_is_that_of_the_documents_and_of_no_cut(units, tmp_path):
    """Any cut into units has the same sum; another document, id or text has another."""

    def digest(units, name):
        parts = [
            sample_units([unit], "all", f"{tmp_path}/{name}/{i}", seed=0)["splits"]["all"]
            for i, unit in enumerate(units)
        ]
        return sum(int(part["digest"], 16) for part in parts) % (1 << 128)

    whole = digest(units, "a")
    source = units[0].file.rpartition("/")[0] + "/*.parquet"
    assert digest(list_units(source, target_bytes=1)[::-1], "b") == whole
    assert digest(units[:-1], "c") != whole
    table = pq.read_table(units[0].file)
    for column, value in (("id", "other"), ("text", "other")):
        values = table[column].to_pylist()
        changed = table.set_column(
            table.schema.get_field_index(column), column, [[value, *values[1:-1], value]]
        )
        pq.write_table(changed, units[0].file)
        assert digest(list_units(source), f"d{column}") != whole


@pytest.mark.parametrize(
    "character", [" ", "\t", "\x1c", "\x85", "\u2003", "\u3000", "\u200b", "a"]
)
def test_empty_is_what_python_calls_white_space(tmp_path, character):
    """Text is dropped when `str.strip` leaves nothing of it."""
    pq.write_table(pa.table({"id": ["a", "b"], "text": [character * 3, ""]}), tmp_path / "x")
    unit = list_units(f"{tmp_path}/x")[0]
    found = sample_units([unit], "all", f"{tmp_path}/out", seed=0)
    assert found["dropped"]["empty text"] == 1 + (not (character * 3).strip())


def test_rows_dropped_later_leave_the_others_as_they_were(units, tmp_path):
    """A unit written again without some rows has the counts and the digest of what is left."""
    first = sample_units(units[:1], "all", f"{tmp_path}/a", seed=0)
    rows = np.arange(0, first["splits"]["all"]["documents"], 3)
    found = drop_rows(f"{tmp_path}/a", {"all": rows}, f"{tmp_path}/b")
    before = pa.Table.from_batches(read_table(f"{tmp_path}/a/all.parquet")).to_pylist()
    after = pa.Table.from_batches(read_table(f"{tmp_path}/b/all.parquet")).to_pylist()
    assert after == [row for i, row in enumerate(before) if i % 3]
    assert found["dropped"] == {"duplicate text": len(rows)}
    tokens = sum(row["token_count"] for row in before[::3])
    assert found["dropped_splits"] == {"all": {"documents": len(rows), "tokens": tokens}}
    assert found["splits"]["all"]["tokens"] + tokens == first["splits"]["all"]["tokens"]
    everything = drop_rows(f"{tmp_path}/a", {"all": np.arange(len(before))}, f"{tmp_path}/c")
    assert everything["splits"] == {}
