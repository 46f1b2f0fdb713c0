"""Ends, joins, padding and offsets of files: read to the end, in bounded batches, or refused."""

from __future__ import annotations

import gzip

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.read.unit import Fields
from data.read.work_units import list_units, read_units
from pipeline.errors import InputError
from tests.data.read.test_formats import read_all, zstandard


def stream(rows, new=pa.ipc.new_stream, **columns):
    """An Arrow stream or file of some texts, two a batch."""
    table, sink = pa.table({"text": rows, **columns}), pa.BufferOutputStream()
    with new(sink, table.schema) as out:
        out.write_table(table, max_chunksize=2)
    return sink.getvalue().to_pybytes()


def parquet(text, **options):
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"text": [text] * 3}), sink, **options)
    return sink.getvalue().to_pybytes()


LINE = b'{"text": "a"}\n'
WINDOW = b"\x28\xb5\x2f\xfd" + bytes([0, 21 << 3]) + (len(LINE) << 3 | 1).to_bytes(3, "little")
A = stream(["a", "a", "a"])
FILE = stream(["a", "a", "a"], pa.ipc.new_file)
ENDS = {
    "padded.jsonl.gz": (gzip.compress(LINE) + bytes(512), 1),
    "padded between.jsonl.gz": ((gzip.compress(LINE) + bytes(99_999)) * 3, 3),
    "tiny members.jsonl.gz": (gzip.compress(LINE) * 9_000, 9_000),
    "padded.txt.gz": (gzip.compress(b"a") + bytes(9), 1),
    "padded, then junk.jsonl.gz": (gzip.compress(LINE) + bytes(9) + b"x", "behind 14 bytes"),
    "empty.jsonl.gz": (b"", "found 0 bytes"),
    "empty.jsonl.zst": (b"", "found 0 bytes"),
    "empty.txt.zst": (b"", "found 0 bytes"),
    "long window.jsonl.zst": (WINDOW + LINE, "zstd --long"),
    "long window second.jsonl.zst": (zstandard(LINE) + WINDOW + LINE, "zstd -d --long=31"),
    "joined.arrow": (A * 3, 9),
    "an empty one, and one.arrow": (stream(pa.array([], pa.string())) + A, 3),
    "half an end.arrow": (A[:-4], "whole Arrow file or stream"),
    "ended in the old way.arrow": (A[:-8] + bytes(4), 3),
    "cut between batches.arrow": (A[: A.rindex(b"\xff\xff\xff\xff", 0, -8)], "no end marker"),
    "without its end.arrow": (A[:-8], "no end marker"),
    "joined with others.arrow": (A + stream(["a"], more=[1]), "a stream of other columns"),
    "and junk.arrow": (A + b"junkjunk", "whole Arrow file or stream"),
    "two files.arrow": (FILE + FILE, "whole Arrow file or stream"),
    "file cut.arrow": (FILE[:-9], "whole Arrow file or stream"),
    "joined.parquet": (parquet("a") + parquet("a"), "two, of which the second begins at byte"),
    "joined, indexed.parquet": (parquet("a") + parquet("a", write_page_index=True), "two, of wh"),
    "indexed.parquet": (parquet("a", write_page_index=True), 3),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_file_is_read_to_its_end_or_refused(tmp_path, name):
    """As `gzip`, `zstd` and `cat` make them, and as a writer that was killed leaves them."""
    content, expected = ENDS[name]
    (tmp_path / name).write_bytes(content)
    if isinstance(expected, str):
        with pytest.raises(InputError, match=expected) as error:
            read_all(list_units(str(tmp_path / name)), ("text",))
        assert f"{tmp_path / name}: expected" in str(error.value)
    else:
        found = read_all(list_units(str(tmp_path / name)), ("text",))
        assert found["text"].to_pylist() == ["a"] * expected


@pytest.mark.parametrize("at", [203, 201, 482, 799])
def test_a_damaged_offset_of_an_arrow_file_is_refused(tmp_path, at):
    """Arrow reads it as it is, and then the process ends."""
    texts = [f"document {i} " * 3 if i % 7 else None for i in range(200)]
    table, sink = pa.table({"text": texts}), pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as out:
        out.write_table(table)
    data = bytearray(sink.getvalue().to_pybytes())
    starts = np.cumsum([0, *(len(text or "") for text in texts)]).astype("<i4").tobytes()
    data[data.index(starts[:40]) + at] = 0x7F
    (tmp_path / "x.arrow").write_bytes(data)
    units = list_units(str(tmp_path / "x.arrow"), Fields(skip_nulls=True, skip_invalid=True))
    with pytest.raises(InputError, match=r"x\.arrow: expected a whole Arrow file or stream"):
        read_all(units, ("id", "text", "token_count"))


def dictionary(size):
    return pa.DictionaryArray.from_arrays(pa.array([0] * 200, pa.int32()), pa.array(["x" * size]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["x.parquet", "plain.parquet", "x.arrow", "view.arrow", "x.txt.gz"]
)
def test_batches_are_bounded_by_decoded_bytes(tmp_path, name):
    """A file of kilobytes with one text of 300 kB 200 times makes no batch of 60 MB."""
    texts = dictionary(300_000)
    if name == "x.txt.gz":
        for index in range(200):
            (tmp_path / f"{index}.txt.gz").write_bytes(gzip.compress(b"x" * 300_000, 1))
    elif name.endswith(".parquet"):
        plain = texts.cast(pa.string()) if name == "plain.parquet" else texts
        pq.write_table(pa.table({"text": plain}), tmp_path / name)
    else:
        kinds = pa.string_view() if name == "view.arrow" else texts.type
        table = pa.table(
            {"text": texts if name == "x.arrow" else texts.cast(pa.string()).cast(kinds)}
        )
        with pa.ipc.new_stream(str(tmp_path / name), table.schema) as out:
            out.write_table(table)
    batches = list(read_units(list_units(str(tmp_path)), ("id", "text")))
    assert sum(batch.num_rows for batch in batches) == 200
    assert max(batch.column("text").nbytes for batch in batches) < 17 << 20
    assert len(batches) <= 8
