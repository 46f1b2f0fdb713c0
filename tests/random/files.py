"""Document files with random damage: read whole or refused by name, and no end of the process.

A sound file of a random kind and layout is damaged (bits, cuts, joins, inserted, deleted, moved and
zeroed ranges, random bytes, broken ends) and read by a child process, which a signal may end. What
it reads must be what an independent reader makes of the same bytes: pyarrow, `json`, `gzip`, or the
program zstd where there is one. Where a format shows that bytes are missing, as all packed formats
and Arrow and Parquet do, the documents must also be those of the sound file, or of both joined.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import resource
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count as counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.faults.registry import Fault, Violation
from tests.random.damaged_files import MISSING, Case

_MEMORY = 8 << 30
_SECONDS = 300
_BATCH = 250
_VOCAB = 1 << 31


# The child process: it reads files, and tells what came of each.


def _digest(rows: Iterable[Sequence[Any]]) -> list[Any]:
    found = [tuple(row) for row in rows]
    return [len(found), hashlib.sha256(repr(found).encode("utf-8", "surrogatepass")).hexdigest()]


def ours(path: str, skips: bool) -> Iterator[tuple[Any, ...]]:
    """(id or None, text) of every document as the project reads it; rows of integers as tuples."""
    from data.read.integer_rows import RowFormat, list_spans, read_rows
    from data.read.unit import Fields
    from data.read.work_units import list_units, read_units

    if path.endswith("rows.parquet"):
        layout = RowFormat(
            column="input_ids", mask_column=None, length=20_000, vocab_size=_VOCAB, padding=None
        )
        for span in list_spans(path, layout):
            for batch in read_rows(span, layout):
                yield from map(_integers, batch)
        return
    units = list_units(path, Fields(skip_nulls=skips, skip_invalid=skips), target_bytes=20_000)
    columns = ["id", "token_count"]  # the first pass reads these alone
    ids = [x for batch in read_units(units, columns) for x in batch.column("id").to_pylist()]
    tally = Counter[str]()
    named = units[0].id is not None
    rows = []
    for batch in read_units(units, ["id", "text", "token_count"], tally):
        rows += zip(batch["id"].to_pylist(), batch["text"].to_pylist(), strict=True)
    if not skips and [id for id, _ in rows] != ids:
        raise AssertionError("two passes that read other documents")
    if tally["rows"] != len(rows) + tally["null"] + tally["invalid"]:
        raise AssertionError(f"{len(rows)} rows of {tally}")
    yield from ((id if named else None, text) for id, text in rows)


def _integers(row: Any) -> tuple[int, ...]:
    """A stored row; `_VOCAB` more marks an id that is not predicted, and zeros fill the row."""
    found = row.tolist()
    while found and found[-1] == _VOCAB:
        found.pop()
    return tuple(value % _VOCAB for value in found)


def theirs(path: str, skips: bool) -> Iterator[tuple[Any, ...]]:
    """The same documents as an independent reader finds them."""
    if path.endswith(".parquet"):
        wanted = [n for n in pq.read_schema(path).names if n != "other"]
        table = pq.read_table(path, columns=wanted, page_checksum_verification=True)
        if path.endswith("rows.parquet"):
            yield from (tuple(row) for row in table["input_ids"].to_pylist())
        else:
            yield from _of_table(table, skips)
    elif path.endswith(".arrow"):
        yield from _of_arrow(path, skips)
    else:
        data = _unpacked(path)
        if ".txt" in path:
            try:
                yield None, data.decode("utf-8-sig")
            except UnicodeDecodeError:
                if not skips:
                    raise
            return
        yield from _of_lines(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), skips)


def _of_lines(lines: list[bytes], skips: bool) -> Iterator[tuple[str | None, str]]:
    """The first document decides whether there are ids."""
    named: bool | None = None
    for line in filter(bytes.strip, lines):
        try:
            id, text = _of_line(line)
            named = id is not None if named is None else named
            if named and id is None:
                raise ValueError("no id")
            yield id if named else None, text
        except (ValueError, TypeError, KeyError, RecursionError):
            if not skips:
                raise


def _of_line(line: bytes) -> tuple[str | None, str]:
    """The document of a line, whose other keys need not be UTF-8."""
    row = json.loads(line.decode("utf-8", "surrogateescape"))
    id, text = row.get("id"), row["text"]
    for value in (str(id), text):
        value.encode("utf-8")
    if type(text) is not str or type(id) not in (str, int, type(None)):
        raise TypeError("values of other types")
    return None if id is None else str(id), text


def _unpacked(path: str) -> bytes:
    if path.endswith(".gz"):
        return gzip.open(path).read()
    if path.endswith(".zst"):
        if program := shutil.which("zstd"):
            return subprocess.run([program, "-dc", path], capture_output=True, check=True).stdout
        return pa.CompressedInputStream(pa.OSFile(path), "zstd").read()
    return Path(path).read_bytes()


def _of_arrow(path: str, skips: bool) -> Iterator[tuple[Any, ...]]:
    with pa.OSFile(path) as source:
        if path.endswith("file.arrow"):
            names = pa.ipc.open_file(source).schema.names
            tables = [pa.ipc.open_file(source, options=_columns(names)).read_all()]
        else:
            tables = []
            while (begin := source.tell()) < source.size():
                names = pa.ipc.open_stream(source).schema.names
                source.seek(begin)
                tables.append(pa.ipc.open_stream(source, options=_columns(names)).read_all())
    for table in tables:
        yield from _of_table(table, skips)


def _columns(names: list[str]) -> pa.ipc.IpcReadOptions:
    wanted = [index for index, name in enumerate(names) if name != "other"]
    return pa.ipc.IpcReadOptions(included_fields=wanted)


def _of_table(table: pa.Table, skips: bool) -> Iterator[tuple[Any, ...]]:
    if not skips:
        table.validate(full=True)
    names, missing = table.schema.names, [None] * table.num_rows
    ids = _values(table, "id") if "id" in names else missing
    counts = table["token_count"].to_pylist() if "token_count" in names else [0] * len(missing)
    for *row, tokens in zip(ids, _values(table, "text"), counts, strict=True):
        absent = row[1] is None or tokens is None or (row[0] is None and "id" in names)
        try:
            if not skips or not (absent or not 0 <= tokens <= 11 * len(row[1]) + 64):
                yield tuple(value if value is None else value.decode() for value in row)
        except UnicodeDecodeError:
            if not skips:
                raise


def _values(table: pa.Table, name: str) -> list[bytes | None]:
    return table[name].cast(pa.string()).cast(pa.binary()).to_pylist()


def _child(reader: str, folder: str, numbers: str) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    from pipeline.errors import InputError

    read: Callable[[str, bool], Iterator[tuple[Any, ...]]] = {"ours": ours, "theirs": theirs}[
        reader
    ]
    for number, name, skips in json.loads(Path(folder, numbers).read_text()):
        _say({"number": number})
        path = str(Path(folder, name))
        try:
            rows = _digest(read(path, skips))
            _say({"number": number, "found": "read", "rows": rows})
        except InputError as error:
            said = str(error)
            found = "refused" if name in said and "\n" not in said else "unclear"
            _say({"number": number, "found": found, "said": said})
        except Exception as error:  # noqa: BLE001 - the point is which
            _say({"number": number, "found": "bare", "said": f"{type(error).__name__}: {error}"})


def _say(row: dict[str, Any]) -> None:
    print(json.dumps(row), flush=True)  # noqa: T201 - to the parent


def outcomes(reader: str, folder: Path, cases: Iterable[tuple[int, str, bool]]) -> dict[int, Any]:
    """What came of each file, by number; `died` where a signal or the time ended the process."""
    found: dict[int, Any] = {}
    left = list(cases)
    for attempt in counter():
        if not left:
            return found
        now, left = left[:_BATCH], left[_BATCH:]
        numbers = f"{reader}-{attempt}.json"
        (folder / numbers).write_text(json.dumps(now))
        command = [sys.executable, "-m", "tests.random.files", reader, str(folder), numbers]
        try:
            child = subprocess.run(
                command, capture_output=True, text=True, timeout=_SECONDS, check=False
            )
            lines, status, last = child.stdout, child.returncode, child.stderr[-300:]
        except subprocess.TimeoutExpired as error:
            lines, status, last = (error.stdout or b"").decode(), "time", ""
        told = [json.loads(line) for line in lines.splitlines() if line.endswith("}")]
        found |= {row["number"]: row for row in told if "found" in row}
        if status:
            culprit = told[-1]["number"] if told else now[0][0]
            found[culprit] = {"number": culprit, "found": "died", "said": f"{status}: {last}"}
        left = [case for case in now if case[0] not in found] + left
    raise AssertionError


def damaged_files(seed: int, count: int, workspace: Path) -> dict[str, Any]:
    """How many files were read and refused; raises for the first that was neither."""
    cases = {number: Case(number) for number in range(seed, seed + count)}
    for case in cases.values():
        (workspace / case.name).write_bytes(case.data)
    files = [(case.number, case.name, case.skips) for case in cases.values()]
    mine = outcomes("ours", workspace, files)
    again = [file for file in files if mine[file[0]]["found"] == "read"]
    others = outcomes("theirs", workspace, again)
    judged = {
        case.number: f"{case.kind}, {case.how}: {why} {mine[case.number]}"
        for case in cases.values()
        if (why := judge(case, mine[case.number], others.get(case.number)))
    }
    figures = Counter(f"{case.kind} {mine[number]['found']}" for number, case in cases.items())
    if judged:
        lines = "\n".join(f"seed {number}: {why}" for number, why in judged.items())
        raise Violation(min(judged), f"{len(judged)} of {count} files: {dict(figures)}\n{lines}")
    return dict(sorted(figures.items()))


def judge(case: Case, mine: dict[str, Any], other: dict[str, Any] | None) -> str:
    """Why an outcome is a failure; empty for a good one."""
    if mine["found"] not in ("read", "refused"):
        return mine["found"]
    if case.how == "none" and mine["found"] != "read":
        return "a sound file refused"
    if mine["found"] == "refused" or other is None or other["found"] == "died":
        return ""  # the other reader may have no check of its own
    if case.kind == "file.arrow" and mine["rows"] in _sound(case):
        return ""  # read to the end as a stream, whatever the places in its footer are
    if other["found"] != "read":
        return f"read, where the other reader says {other['said']}"
    if mine["rows"] != other["rows"]:
        return f"other documents than the other reader's {other['rows']}"
    shown = ".gz" in case.kind or (case.how in MISSING and case.kind not in ("txt", "jsonl"))
    if shown and mine["rows"][0] != len(case.rows):
        return f"{mine['rows'][0]} of {len(case.rows)} documents"
    return ""


def _sound(case: Case) -> list[Any]:
    return [_digest(case.rows), _digest((None, text) for _, text in case.rows)]


SUITES = (Fault("damaged document files, against other readers", 150, 6000, damaged_files),)


if __name__ == "__main__":
    _child(*sys.argv[1:])
