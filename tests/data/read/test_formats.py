"""Every kind of file holds the same documents, and what is wrong is named by its place."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.read import parquet_table, work_units
from data.read.unit import SCORE, Fields, small_together
from data.read.work_units import list_units, read_unit, read_units
from data.select.hash_ranges import Ranges
from data.select.write_sample import NULL, sample_units
from pipeline.errors import InputError
from pipeline.store import storage
from tests.faults.fake_gcs import FakeGCS, Faults
from tests.faults.hub import quick_retries

COLUMNS = ("id", "text", "token_count", "score")


def rows(count=300):
    draw = np.random.default_rng(0)
    letters = np.array(list('abc déf中\n\t"\\ é'))
    return [
        {
            "id": f"doc-{i}",
            "text": "".join(draw.choice(letters, int(draw.integers(1, 400)))),
            "token_count": int(draw.integers(0, 3)),
            "score": float(i % 5),
            "meta": {"deep": [1, None, 2]},
        }
        for i in range(count)
    ]


def lines(documents):
    # Half of them as ASCII with escapes, which is what most writers make.
    return b"".join(
        json.dumps(row, ensure_ascii=bool(i % 2)).encode() + (b"\r\n" if i % 3 else b"\n")
        for i, row in enumerate(documents)
    )


def zstandard(data):
    """One frame."""
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as out:
        out.write(data)
    return sink.getvalue().to_pybytes()


def write(path, documents):
    """A file of the kind that its name says."""
    name, table = path.name, pa.Table.from_pylist(documents)
    if name.endswith(".parquet"):
        pq.write_table(table, path, row_group_size=50)
    elif name.endswith(".arrow"):
        new = pa.ipc.new_file if "footer" in name else pa.ipc.new_stream
        with new(str(path), table.schema) as out:
            out.write_table(table, max_chunksize=70)
    else:
        data = lines(documents)
        if name.endswith(".gz"):  # two members, as `cat` of two files has
            data = gzip.compress(data[:1000]) + gzip.compress(data[1000:])
        elif name.endswith(".zst"):
            data = zstandard(data[:1000]) + zstandard(data[1000:])
        path.write_bytes(data)
    return str(path)


def read_all(units, columns=COLUMNS):
    own = [SCORE if name == "score" else name for name in columns]
    batches = [b for unit in units for b in read_unit(unit, own)]
    return pa.Table.from_batches(batches).rename_columns(list(columns))


NAMES = ("x.jsonl", "x.jsonl.gz", "x.ndjson.zst", "x.json", "x.arrow", "footer.arrow")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("target", [1 << 30, 5000])
def test_documents_are_those_of_parquet(tmp_path, name, target):
    """Whatever the kind, and however a file is cut into units."""
    documents = rows()
    expected = read_all(list_units(write(tmp_path / "x.parquet", documents)))
    units = list_units(write(tmp_path / name, documents), target_bytes=target)
    assert read_all(units).equals(expected)
    assert (len(units) > 10) == (target == 5000 and name in ("x.jsonl", "x.json"))
    for part in (("id",), ("token_count", "id"), ("text",)):
        assert read_all(units, part).equals(expected.select(part))


@pytest.mark.slow
def test_every_kind_is_read_from_a_bucket_that_fails(tmp_path):
    """A fifth of the requests fail; a folder of text files is one too."""
    documents = rows(60)
    expected = read_all(list_units(write(tmp_path / "x.parquet", documents)))
    texts = [row["text"] for row in documents[:9]]
    with FakeGCS() as server, quick_retries():
        server.faults = Faults(0.2, seed=1)
        for name in NAMES:
            there = f"gs://bucket/{name}"
            content = Path(write(tmp_path / name, documents)).read_bytes()
            storage.write_atomic(there, content)
            assert read_all(list_units(there, target_bytes=5000)).equals(expected)
        for number, text in enumerate(texts):
            storage.write_atomic(f"gs://bucket/texts/{number}.txt", text.encode())
        folder = list_units("gs://bucket/texts")
        found = pa.Table.from_batches(read_units(folder, ("text",)))
    assert found["text"].to_pylist() == texts


@pytest.mark.parametrize("name", ["x.parquet", *NAMES])
def test_an_id_that_is_not_there_is_made_of_the_text(tmp_path, name):
    """BLAKE2b-128, so it is known where the text is; other names of columns are given."""
    documents = [{"body": row["text"]} for row in rows(60)]
    source = write(tmp_path / name, documents)
    table = read_all(list_units(source, Fields(text="body")), ("id", "token_count"))
    texts = [row["body"].encode() for row in documents]
    expected = [hashlib.blake2b(text, digest_size=16).hexdigest() for text in texts]
    assert table["id"].to_pylist() == expected
    assert table["token_count"].to_pylist() == [-(-len(text) // 4) for text in texts]
    with pytest.raises(InputError, match="pass text=<name of the"):
        list_units(source)
    if name.endswith((".parquet", ".arrow")):
        with pytest.raises(InputError, match="pass id=<name of the column>"):
            list_units(source, Fields(text="body", id="key"))


def test_a_folder_of_text_is_a_document_a_file(tmp_path):
    """Plain and compressed, a mark of byte order left out; what is no document is not read."""
    (tmp_path / "deep").mkdir()
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone")
    (tmp_path / "deep" / "b.md").write_text("zwei\n\u4e09", encoding="utf-8")
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(b"four"))
    (tmp_path / "dataset_info.json").write_text("{}")
    table = read_all(list_units(str(tmp_path)), ("text", "token_count"))
    assert table["text"].to_pylist() == ["one", "four", "zwei\n\u4e09"]
    assert table["token_count"].to_pylist() == [1, 1, 2]


@pytest.mark.parametrize("kind", ["dictionary", "string_view"])
def test_strings_of_any_arrow_type_are_strings(tmp_path, kind):
    """As pandas and Polars write them."""
    type = pa.dictionary(pa.int32(), pa.string()) if kind == "dictionary" else pa.string_view()
    table = pa.table({"id": ["a", "b", "c"], "text": pa.array(["x", "y", "x"]).cast(type)})
    pq.write_table(table, tmp_path / "x.parquet")
    with pa.ipc.new_stream(str(tmp_path / "x.arrow"), table.schema) as out:
        out.write_table(table)
    for name in ("x.parquet", "x.arrow"):
        found = read_all(list_units(str(tmp_path / name)), ("text",))
        assert found["text"].to_pylist() == ["x", "y", "x"]


@pytest.mark.parametrize("name", ["x.parquet", "x.arrow", "x.jsonl"])
def test_rows_with_nulls_are_left_out_and_counted_when_asked(tmp_path, name):
    """By every pass the same, so that what was chosen is what is written."""
    documents = rows(40)
    documents[3]["text"] = documents[30]["text"] = documents[7]["id"] = None
    documents[9]["token_count"] = None
    source = write(tmp_path / name, documents)
    with pytest.raises(InputError, match=r"found null; .* skip_nulls=True"):
        read_all(list_units(source))
    units = list_units(source, Fields(skip_nulls=True))
    tally = Counter[str]()
    batches = [b for u in units for b in read_unit(u, ("id", "token_count"), tally)]
    kept = [r["id"] for r in documents if None not in (r["id"], r["token_count"])]
    assert pa.Table.from_batches(batches)["id"].to_pylist() == kept
    assert +tally == {"rows": 40, "null": 2}
    found = sample_units(units, "all", str(tmp_path / "out"), seed=0)
    assert (
        found["seen"] == 40 == found["splits"]["all"]["documents"] + sum(found["dropped"].values())
    )
    assert found["dropped"][NULL] == 4


BAD_LINES = {
    "cut": (b'{"text": "a', "malformed"),
    "array": (b'["text"]', "Expected `object`"),
    "number": (b'{"text": 5}', "got `int`"),
    "no text": (b'{"id": "x"}', "no key 'text'"),
    "two": (b'{"text": "a"}{"text": "b"}', "malformed"),
    "surrogate": (rb'{"text": "\ud800"}', "lone surrogate"),
    "cut after one": (rb'{"text": "\ud800', "truncated"),
    "a number beside one": (rb'{"text": 5, "id": "\ud800"}', "got `int`"),
    "latin-1": (b'{"text": "caf\xe9"}', "utf-8"),
    "huge count": (b'{"text": "a", "token_count": 99999999999999999999}', "out of range|<="),
    "deep": (b'{"text": "a", "x": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", "recursion|depth|nest"),
}


@pytest.mark.parametrize("kind", BAD_LINES)
def test_a_bad_line_is_named_by_its_byte(tmp_path, kind):
    """After two good ones, of which a blank line is none."""
    line, words = BAD_LINES[kind]
    good = b'{"text": "good", "id": "1", "token_count": 1}\n\n'
    (tmp_path / "x.jsonl").write_bytes(good + line + b"\n")
    with pytest.raises(
        InputError, match=rf"x\.jsonl: the line at byte {len(good)}: .*({words})"
    ) as e:
        read_all(list_units(str(tmp_path / "x.jsonl")), ("text", "token_count"))
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("x.csv", b"a,b", r"found a \.csv file; convert it"),
        ("x.parquet.gz", b"", "unpack the file"),
        ("x.txt", b"caf\xe9", r"not UTF-8 \(byte 3\)"),
        ("x", b"\x00\xff\xfe", r"not UTF-8 \(byte 1\)"),
        ("x.jsonl.gz", gzip.compress(lines(rows(50)))[:-9], "whole compressed file"),
        ("x.jsonl.zst", b'{"text": "a"}', "whole compressed file"),
        ("x.arrow", b"ARROW1 and no more of it", "whole Arrow file or stream"),
        ("x.jsonl", b"", "0 rows in all"),
    ],
)
def test_a_bad_file_is_named(tmp_path, name, content, words):
    """One line with the file, what was found, and what to do."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=words):
        read_all(list_units(str(tmp_path / name)), ("text",))


INVALID_LINES = [line for line, _ in BAD_LINES.values()]


@pytest.mark.parametrize("name", ["x.jsonl", "x.parquet", "x.arrow", "x.jsonl.gz"])
def test_invalid_rows_are_left_out_and_counted_when_asked(tmp_path, name):
    """By every pass the same; the rows that are there are all accounted for."""
    good = rows(40)
    if ".jsonl" in name:
        first, rest = lines(good[:1]), lines(good[1:])
        data = b"oops\n" + first + b"\n".join([*INVALID_LINES, rest])
        (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
        bad = 1 + len(INVALID_LINES)
    else:
        texts = [row["text"].encode() for row in good] + [b"caf\xe9", b"good", b"\xff", b"good"]
        counts = [row["token_count"] for row in good] + [1, 10_000, 2**63, 1]
        table = pa.table(
            {
                "id": [row["id"] for row in good] + ["a", "b", "c", "last"],
                "text": pa.array(texts, pa.binary()).view(pa.string()),
                "token_count": pa.array(counts, pa.uint64()),
            }
        )
        if name == "x.parquet":
            pq.write_table(table, tmp_path / name, row_group_size=30)
        else:
            with pa.ipc.new_stream(str(tmp_path / name), table.schema) as out:
                out.write_table(table)
        good, bad = [*good, {"id": "last", "text": "good"}], 3
    with pytest.raises(InputError, match=r"or leave such rows out with skip_invalid=True|repair"):
        read_all(list_units(str(tmp_path)), ("id", "text", "token_count"))
    units = list_units(str(tmp_path), Fields(skip_invalid=True))
    tally = Counter[str]()
    batches = list(read_units(units, ("id", "text", "token_count"), tally))
    found = pa.Table.from_batches(batches)
    assert found["id"].to_pylist() == [row["id"] for row in good]
    assert found["text"].to_pylist() == [row["text"] for row in good]
    assert +tally == {"rows": len(good) + bad, "invalid": bad}
    sampled = sample_units(units, "all", str(tmp_path / "out"), seed=0)
    assert sampled["dropped"]["invalid"] == bad
    kept = sampled["splits"]["all"]["documents"]
    assert sampled["seen"] == kept + sum(sampled["dropped"].values())


def test_the_row_of_an_error_is_that_of_the_file(tmp_path):
    """Whatever was skipped before it, and by the column's own name."""
    texts = pa.array([None, b"a", None, b"\xff"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"body": texts}), tmp_path / "x.parquet")
    units = list_units(str(tmp_path / "x.parquet"), Fields(text="body", skip_nulls=True))
    with pytest.raises(InputError, match=r"row group 0, row 3 .*: 'body' is not UTF-8 \(byte 0\)"):
        read_all(units, ("text",))
    units = list_units(str(tmp_path / "x.parquet"), Fields(text="body", skip_invalid=True))
    with pytest.raises(InputError, match=r"row 0 \(counted from 0\): expected a value in 'body'"):
        read_all(units, ("text",))


def test_small_files_are_together_and_large_ones_alone(tmp_path):
    """In order, none twice, and a sample of them is that of one file."""
    documents = rows(40)
    for index, row in enumerate(documents):
        write(tmp_path / f"{index:02d}.jsonl", [row])
    units = list_units(f"{tmp_path}/*.jsonl")
    (together,) = small_together(units)
    assert together == tuple(units)
    everything = Ranges(splits=(("train", 0, 2**64 - 1),))
    many = sample_units(together, everything, str(tmp_path / "many"), seed=0)
    whole = list_units(write(tmp_path / "whole.parquet", documents))
    one = sample_units(whole, everything, str(tmp_path / "one"), seed=0)
    assert many["splits"] == one["splits"]
    assert many["seen"] == 40


@pytest.mark.slow
def test_text_files_that_are_read_together_are_written_as_one_by_one(tmp_path, monkeypatch):
    """The same bytes, in the same row groups, with another kind of file and a null among them."""
    for index, row in enumerate(rows(120)):
        (tmp_path / f"{index:03d}.txt").write_text(row["text"] if index % 7 else " \n")
    write(tmp_path / "050.jsonl", [{"text": "a line"}, {"text": None}, {"text": "another"}])
    (tmp_path / "060.md.gz").write_bytes(gzip.compress("gepackt, \u5305".encode()))
    units = list_units(str(tmp_path), Fields(skip_nulls=True))
    ranges = Ranges(splits=(("train", 0, 2**63), ("validation", 2**63 + 1, 2**64 - 1)))
    monkeypatch.setattr(parquet_table, "_ROW_GROUP_BYTES", 2_000)
    read, calls = work_units._READ["text"], []
    monkeypatch.setitem(work_units._READ, "text", lambda *a: [calls.append(a), read(*a)][1])
    together = sample_units(units, ranges, str(tmp_path / "together"), seed=0, keep_hashes=True)
    assert len(calls) == 2
    assert [len(some) for some, _ in calls] == [50, 71]
    monkeypatch.setattr(work_units, "BATCH_ROWS", 1)
    apart = sample_units(units, ranges, str(tmp_path / "apart"), seed=0, keep_hashes=True)
    assert len(calls) == 2 + 121
    assert together == apart
    assert together["seen"] == 124
    assert together["dropped"] == {"empty text": 18, "outside the ranges": 0, NULL: 1}
    files = sorted(path.name for path in (tmp_path / "together").iterdir())
    assert len(files) == 4
    for name in files:
        one, other = (tmp_path / place / name for place in ("together", "apart"))
        assert one.read_bytes() == other.read_bytes(), name
    assert pq.ParquetFile(tmp_path / "together" / "train.parquet").num_row_groups > 3


def test_a_count_of_a_text_in_compressed_buffers_is_possible(tmp_path):
    """Also where the text is not read, and the file has fewer bytes than tokens."""
    table = pa.table({"id": ["a"], "text": ["word " * 50_000], "token_count": [50_000]})
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(str(tmp_path / "x.arrow"), table.schema, options=options) as out:
        out.write_table(table)
    units = list_units(str(tmp_path / "x.arrow"))
    assert read_all(units, ("id", "token_count"))["token_count"].to_pylist() == [50_000]


def test_the_values_of_a_score_are_those_of_the_lines(tmp_path):
    """A score that is not read need not be a number; one that is kept too is not written anew."""
    scores = ["5", "12345678901234567890", "0.10", "null"]
    file = tmp_path / "x.jsonl"
    file.write_text("".join(f'{{"text": "a", "score": {score}}}\n' for score in scores))
    (unit,) = list_units(str(file), Fields(columns=("score",), skip_nulls=True))
    (batch,) = read_unit(unit, ("text", "score"))
    assert batch.column("score").to_pylist() == [*scores[:3], None]
    (batch,) = read_unit(unit, ("score", SCORE))
    assert batch.column("score").to_pylist() == scores[:3]
    assert batch.column(SCORE).to_pylist() == [5.0, 12345678901234567890.0, 0.1]
    file.write_text('{"text": "a", "score": "high"}\n')
    for fields in (Fields(), Fields(columns=("score",))):
        (unit,) = list_units(str(file), fields)
        (batch,) = read_unit(unit, ("text", *fields.columns))
        assert batch.to_pylist() == [{"text": "a"} | dict.fromkeys(fields.columns, "high")]
        with pytest.raises(InputError, match=r"byte 0: expected a JSON .*`float"):
            list(read_unit(unit, ("text", SCORE)))
