"""Sound document files of every kind and layout, and what damage does to them."""

from __future__ import annotations

import gzip
import io
import json
import random

import pyarrow as pa
import pyarrow.parquet as pq

Rows = list[tuple[str | None, str]]

KINDS = (
    *("parquet", "arrow", "file.arrow", "jsonl", "jsonl.gz", "jsonl.zst"),
    *("txt", "txt.gz", "txt.zst", "rows.parquet"),
)
DAMAGES = (
    *("none", "bit", "bits", "byte", "bytes", "zeros", "cut", "tail", "insert", "delete", "move"),
    *("join", "padding", "end", "end bits", "random"),
)
MISSING = {"cut", "delete", "insert", "join", "padding"}  # shown by whatever has an end
_WORDS = (
    "water",
    "Stein",
    "lumière",
    "北京",
    "wind",
    "\U0001f30a",
    "a",
    'quo"te',
    "back\\slash",
    "\n",
)


def documents(draw: random.Random) -> Rows:
    """Ids and texts, few or many, short or long."""
    rows = draw.choice((1, 3, 40, 200))
    longest = draw.choice((3, 30, 200))
    return [
        (f"doc-{n}", " ".join(draw.choices(_WORDS, k=draw.randint(1, longest))))
        for n in range(rows)
    ]


def sound(kind: str, draw: random.Random, rows: Rows) -> bytes:
    """A file of these documents, in one of the layouts that writers choose."""
    if kind.endswith("parquet"):
        return _parquet(kind, draw, rows)
    if kind.endswith("arrow"):
        return _arrow(kind, draw, rows)
    data = rows[0][1].encode()
    if kind.startswith("jsonl"):
        ascii, end = draw.random() < 0.5, draw.choice(("\n", "\r\n", "\n\n"))
        found = ({"id": id, "text": text, "other": [1, None]} for id, text in rows)
        data = b"".join(f"{json.dumps(x, ensure_ascii=ascii)}{end}".encode() for x in found)
    parts = [data]
    if draw.random() < 0.3:  # several members or frames
        middle = draw.randrange(len(data))
        parts = [data[:middle], data[middle:]]
    if kind.endswith(".gz"):
        return b"".join(gzip.compress(part, draw.choice((0, 1, 9))) for part in parts)
    if kind.endswith(".zst"):
        return b"".join(pa.Codec("zstd").compress(part).to_pybytes() for part in parts)
    return data


def _table(kind: str, draw: random.Random, rows: Rows) -> pa.Table:
    if kind == "rows.parquet":
        ids = [list(text.encode()) for _, text in rows]
        return pa.table(
            {"input_ids": pa.array(ids, draw.choice((LIST, pa.large_list(pa.uint8()))))}
        )
    strings = (pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string()))
    types = (*strings, pa.string_view())
    texts = pa.array([text for _, text in rows], pa.string()).cast(draw.choice(types))
    columns = {"text": texts}
    if draw.random() < 0.7:
        columns["id"] = pa.array([id for id, _ in rows], pa.string())
    if draw.random() < 0.5:
        columns["token_count"] = pa.array([len(text) for _, text in rows], pa.int64())
    return pa.table({**columns, "other": [[1.5, None]] * len(rows)})


LIST = pa.list_(pa.int32())


def _parquet(kind: str, draw: random.Random, rows: Rows) -> bytes:
    sink = io.BytesIO()
    pq.write_table(
        _table(kind, draw, rows),
        sink,
        row_group_size=draw.choice((7, 1000)),
        compression=draw.choice(("none", "snappy", "gzip", "zstd")),
        use_dictionary=draw.random() < 0.5,
        data_page_version=draw.choice(("1.0", "2.0")),
        data_page_size=draw.choice((100, 1 << 20)),
        write_page_checksum=draw.random() < 0.5,
        write_page_index=draw.random() < 0.3,
        store_schema=draw.random() < 0.7,
    )
    return sink.getvalue()


def _arrow(kind: str, draw: random.Random, rows: Rows) -> bytes:
    table, sink = _table(kind, draw, rows), io.BytesIO()
    options = pa.ipc.IpcWriteOptions(compression=draw.choice((None, "zstd", "lz4")))
    new = pa.ipc.new_file if kind == "file.arrow" else pa.ipc.new_stream
    with new(sink, table.schema, options=options) as out:
        out.write_table(table.combine_chunks(), max_chunksize=draw.choice((1, 7, 1000)))
    return sink.getvalue()


def damaged(how: str, draw: random.Random, data: bytes, other: bytes) -> bytes:
    """The file with one kind of damage."""
    found, size = bytearray(data), len(data)
    begin = draw.randrange(size)
    end = min(size, begin + draw.choice((1, 8, 64, 1000)))
    if how in ("bit", "bits", "end bits"):
        for _ in range(1 if how == "bit" else draw.randint(2, 20)):
            first = max(0, size - 400) if how == "end bits" else 0
            found[draw.randrange(first, size)] ^= 1 << draw.randrange(8)
    elif how in ("byte", "bytes", "zeros"):
        end = begin + 1 if how == "byte" else end
        value = draw.choice((0x00, 0x7F, 0x80, 0xFF))
        length = end - begin
        found[begin:end] = bytes(length) if how == "zeros" else bytes([value]) * length
        if how == "bytes":
            found[begin:end] = draw.randbytes(length)
    elif how == "cut":
        del found[begin:]
    elif how == "tail":
        del found[:begin]
    elif how == "insert":
        again = data[begin:end][: size - 1]  # the whole file twice is a sound one
        found[begin:begin] = draw.choice((draw.randbytes(end - begin), again))
    elif how == "delete":
        del found[begin:end]
    elif how == "move":
        part = found[begin:end]
        del found[begin:end]
        place = draw.randrange(len(found) + 1)
        found[place:place] = part
    elif how == "join":
        found += other
    elif how == "padding":
        found += bytes(draw.choice((1, 8, 512)))
    elif how == "end":
        found[-draw.randint(1, 16) :] = draw.randbytes(draw.randint(0, 16))
    elif how == "random":
        found = bytearray(draw.randbytes(draw.choice((0, 10, 1000))))
        found[:0] = draw.choice((b"", data[:8], data[:200]))
    return bytes(found)


class Case:
    """One damaged file, made from its number.

    Attributes:
        data: the file's bytes.
        rows: the documents that went in.
        skips: whether rows with a null and invalid rows are to be skipped.
    """

    def __init__(self, number: int) -> None:
        draw = random.Random(number)
        self.number = number
        self.kind, self.how = draw.choice(KINDS), draw.choice(DAMAGES)
        self.skips = draw.random() < 0.3
        first = documents(draw)
        second = first if draw.random() < 0.5 else documents(draw)
        layout = draw.random()
        one, two = (sound(self.kind, random.Random(layout), rows) for rows in (first, second))
        self.data = damaged(self.how, draw, one, two)
        rows = first + second if self.how == "join" else first
        self.rows = rows[:1] if self.kind.startswith("txt") else rows

    @property
    def name(self) -> str:
        """The file's name, which tells its format."""
        return f"{self.number}.{self.kind}"
