"""Source files that are not what they should be, each refused by name or read as it is.

A kind is a function that writes one bad file between two good ones and returns what must happen:
words of the `InputError`, or the rows that are read. Nothing else may come of it.
"""

from __future__ import annotations

import base64
import gzip
import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as pe

from data.read.work_units import list_units, read_unit
from pipeline.errors import InputError
from tests.faults.registry import Fault, pick, trials

ROWS = 60
GROUP = 20
HUGE = 50 << 20
COLUMNS = ("id", "text", "token_count")

# The words of an error, or the rows of the middle file.
Outcome = list[str] | pa.Table
Kind = Callable[[Path, random.Random], Outcome]


def table(draw: random.Random, rows: int = ROWS) -> pa.Table:
    """Documents of words, so that pages are dictionary coded and compressed as real ones are."""
    words = ["water", "stone", "light", "北京", "and", "the"]
    return pa.table(
        {
            "id": [f"{draw.randrange(1 << 60):x}-{row}" for row in range(rows)],
            "text": [" ".join(draw.choices(words, k=draw.randrange(1, 60))) for _ in range(rows)],
            "token_count": pa.array([draw.randrange(1, 60) for _ in range(rows)], pa.int64()),
        }
    )


def write(rows: pa.Table, path: Path, **options: Any) -> None:
    """A file in row groups of `GROUP` rows."""
    pq.write_table(rows, path, row_group_size=GROUP, **options)


def _bytes(path: Path, draw: random.Random, change: Callable[[bytes], bytes]) -> list[str]:
    write(table(draw), path)
    path.write_bytes(change(path.read_bytes()))
    return []


def _replaced(draw: random.Random, name: str, row: int, value: Any) -> pa.Table:
    rows = table(draw)
    values = rows[name].to_pylist()
    values[row] = value
    place = rows.schema.get_field_index(name)
    return rows.set_column(place, name, pa.array(values, rows.schema.field(name).type))


def empty_file(path: Path, draw: random.Random) -> Outcome:
    """No byte."""
    path.write_bytes(b"")
    return []


def html(path: Path, draw: random.Random) -> Outcome:
    """The page that a server sent in place of the file."""
    path.write_bytes(b"<!DOCTYPE html><html><body>502 Bad Gateway</body></html>")
    return ["HTML"]


def zipped(path: Path, draw: random.Random) -> Outcome:
    """Compressed once more."""
    return [*_bytes(path, draw, gzip.compress), "gzip"]


def footer_only(path: Path, draw: random.Random) -> Outcome:
    """The end of a file without its beginning."""
    return _bytes(path, draw, lambda d: d[-8 - int.from_bytes(d[-8:-4], "little") :])


def twice(path: Path, draw: random.Random) -> Outcome:
    """One name for two columns."""
    rows, name = table(draw), draw.choice(COLUMNS)
    write(rows.append_column(name, rows[name]), path)
    return [repr(name)]


def not_utf8(path: Path, draw: random.Random) -> Outcome:
    """Bytes that are no text in a column that says it is."""
    row, name = draw.randrange(ROWS), draw.choice(("text", "id"))
    rows = table(draw)
    values = [value.encode() for value in rows[name].to_pylist()]
    values[row] = draw.choice([b"caf\xe9", b"\xff\xfe", b"\xed\xa0\x80", b"\xc0\x80"])
    strings = pa.array(values, pa.binary()).view(pa.string())
    write(rows.set_column(rows.schema.get_field_index(name), name, strings), path)
    return [
        f"row group {row // GROUP}, row {row % GROUP} (counted from 0):",
        repr(name),
        "not UTF-8",
    ]


def _encrypted(path: Path, draw: random.Random, plaintext_footer: bool) -> None:
    class Keys(pe.KmsClient):
        """Wraps keys by writing them down."""

        def __init__(self, config: Any) -> None:
            super().__init__()

        def wrap_key(self, key: bytes, name: str) -> bytes:
            """The key as it is."""
            return base64.b64encode(key)

        def unwrap_key(self, key: bytes, name: str) -> bytes:
            """The key as it is."""
            return base64.b64decode(key)

    settings = pe.EncryptionConfiguration(
        footer_key="f", column_keys={"c": ["text"]}, plaintext_footer=plaintext_footer
    )
    factory = pe.CryptoFactory(Keys)
    properties = factory.file_encryption_properties(pe.KmsConnectionConfig(), settings)
    write(table(draw), path, encryption_properties=properties)


def encrypted_footer(path: Path, draw: random.Random) -> Outcome:
    """A file for whoever has the key."""
    _encrypted(path, draw, plaintext_footer=False)
    return ["encrypted"]


def encrypted_text(path: Path, draw: random.Random) -> Outcome:
    """A footer for all, a text column for whoever has the key."""
    _encrypted(path, draw, plaintext_footer=True)
    return ["encrypted"]


def no_rows(path: Path, draw: random.Random) -> Outcome:
    """A schema and nothing else."""
    rows = table(draw).slice(0, 0)
    write(rows, path)
    return rows


def empty_text(path: Path, draw: random.Random) -> Outcome:
    """Documents of nothing: `data.select.hash_ranges` drops and counts them."""
    rows = _replaced(draw, "text", draw.randrange(ROWS), draw.choice(["", " \n"]))
    write(rows, path)
    return rows


def huge_row(path: Path, draw: random.Random) -> Outcome:
    """One document of 50 MB."""
    rows = _replaced(draw, "text", draw.randrange(ROWS), draw.choice("xyz") * HUGE)
    write(rows, path)
    return rows


KINDS: tuple[Kind, ...] = (
    empty_file,
    html,
    zipped,
    footer_only,
    twice,
    not_utf8,
    encrypted_footer,
    encrypted_text,
    no_rows,
    empty_text,
    huge_row,
)


def bad_files(seed: int, count: int, workspace: Path) -> dict[str, Any]:
    """A bad file between good ones: an error that names it, or every row as it was written."""
    seen: dict[str, int] = {"refused": 0, "read": 0}

    def trial(number: int) -> None:
        draw = random.Random(number)
        folder = workspace / str(number)
        folder.mkdir()
        good = [table(draw), table(draw)]
        write(good[0], folder / "a.parquet")
        write(good[1], folder / "c.parquet")
        kind = KINDS[pick(number, len(KINDS))]
        outcome = kind(folder / "b.parquet", draw)
        found, error = _attempt(lambda: _read(f"{folder}/*.parquet"))
        for path in folder.iterdir():
            path.unlink()
        if isinstance(outcome, pa.Table):
            assert error is None, f"{kind.__name__}: {error}"
            assert found is not None
            assert found.equals(pa.concat_tables([good[0], outcome, good[1]])), kind.__name__
            seen["read"] += 1
        else:
            words = ["b.parquet", *outcome]
            assert error is not None, f"{kind.__name__}: was read"
            assert all(word in str(error) for word in words), f"{kind.__name__}: {words}: {error}"
            seen["refused"] += 1

    return {"trials": trials(seed, count, trial), **seen}


def _read(source: str) -> pa.Table:
    batches = [read_unit(unit, COLUMNS) for unit in list_units(source, target_bytes=1)]
    return pa.Table.from_batches(
        itertools.chain.from_iterable(batches), table(random.Random()).schema
    )


def _attempt(action: Callable[[], Any]) -> tuple[Any, InputError | None]:
    try:
        return action(), None
    except InputError as error:
        return None, error


def flips(seed: int, count: int, workspace: Path) -> dict[str, Any]:
    """One bit of a file with page checksums flips: refused, or nothing that is read differs."""
    rows = table(random.Random(0), 400)
    path = workspace / "flips.parquet"
    codecs = {}
    for codec in ("zstd", "snappy", "none"):
        write(rows, path, compression=codec, write_page_checksum=True)
        codecs[codec] = path.read_bytes()
    figures = {"refused": 0, "harmless": 0}

    def trial(number: int) -> None:
        draw = random.Random(number)
        data = bytearray(codecs[draw.choice(sorted(codecs))])
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
        found, error = _attempt(lambda: _read(str(path)))
        assert error is None or "flips.parquet" in str(error), str(error)
        assert found is None or found.equals(rows), "read wrong"
        figures["refused" if error else "harmless"] += 1

    return {"trials": trials(seed, count, trial), **figures}


FAULTS = {
    18: [
        Fault("bad source files", 2 * len(KINDS), 20 * len(KINDS), bad_files),
        Fault("flipped bits under page checksums", 40, 1500, flips, slow=False),
    ]
}
