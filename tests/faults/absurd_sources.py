"""One absurd value in a source or in what is asked of it: bounded, refused or counted (fault 54).

Every trial writes ordinary documents with one absurd thing among them, samples them, trains a
tokenizer on them, samples them again by its tokens and tokenises them. It is refused by a line that
says what to do, or it comes through whole, every document of it. Before a release the things have
their full size, and each trial is a process of its own whose peak of memory is measured.

    python -m tests.faults.absurd_sources KIND FOLDER    one of full size: prints its figures
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import steps
from data.read.listing import list_source
from data.read.parquet_table import read_table
from data.tokenizer.long_documents import MOST_BYTES
from pipeline.errors import InputError, StepFailed
from pipeline.graph.step import as_node
from pipeline.store import storage
from pipeline.store.manifest import load
from tests.faults.registry import Fault, pick, trials
from tests.pipeline.helpers import bring_up

MOST_MEMORY = 2 << 30
MOST_DISK = 3.0  # of the text
FIXED_DISK = 32 << 20  # counts of two surveys, a mebibyte a task
SECONDS = 600
HUGE = 2**62
VOCAB = 300
WORDS = ("water", "stone", "light", "and", "the", "of", "over", "under", "wind", "sails")


@dataclass(frozen=True)
class Size:
    """How absurd.

    Attributes:
        text: characters of a long document.
        files: tiny ones in a folder.
    """

    text: int
    files: int


SMALL, FULL = Size(400_000, 100), Size(60_000_000, 10_000)


@dataclass(frozen=True, kw_only=True)
class Case:
    """What was written, and what must come of it.

    Attributes:
        source: of the documents.
        refused: words of the line; empty where it must come through.
        documents: that are kept.
        dropped: by reason.
        options: of `sample`.
        vocab_size: of the tokenizer.
        skipped: names that a plan says are not read.
    """

    source: str
    refused: tuple[str, ...] = ()
    documents: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    vocab_size: int = VOCAB
    skipped: tuple[str, ...] = ()


Kind = Callable[[Path, Size, random.Random], Case]


def prose(draw: random.Random, characters: int) -> str:
    """Words, of about so many characters."""
    page = " ".join(draw.choices(WORDS, k=2_000)) + "\n"
    return (page * (1 + characters // len(page)))[:characters]


def ordinary(draw: random.Random, count: int = 40) -> list[dict[str, Any]]:
    """Documents of some hundred characters, with ids."""
    return [{"id": f"{n}", "text": f"{n} {prose(draw, 400)}"} for n in range(count)]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    """Rows as Parquet or JSON lines, by the name."""
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def _name(draw: random.Random) -> str:
    return draw.choice(("x.parquet", "x.jsonl"))


def _counted(count: Callable[[dict[str, Any]], int], *words: str) -> Kind:
    def kind(folder: Path, size: Size, draw: random.Random) -> Case:
        rows = [{**row, "token_count": len(row["text"]) // 5} for row in ordinary(draw)]
        row = draw.choice(rows)
        row["token_count"] = count(row)
        return Case(source=write(folder / _name(draw), rows), refused=words)

    return kind


def huge_budget(folder: Path, size: Size, draw: random.Random) -> Case:
    """More tokens asked for than were ever written."""
    options = draw.choice(({"tokens": HUGE}, {"splits": (("validation", HUGE),)}))
    source = write(folder / _name(draw), ordinary(draw))
    return Case(source=source, options=options, refused=(f"{HUGE:,} tokens asked", "ask for less"))


def huge_vocabulary(folder: Path, size: Size, draw: random.Random) -> Case:
    """A tokenizer of more entries than there are pairs."""
    source = write(folder / _name(draw), ordinary(draw))
    return Case(source=source, vocab_size=HUGE, refused=(f"vocab_size={HUGE}", "ask for"))


def _long(text: Callable[[random.Random, int], str], *, words: bool = False) -> Kind:
    """One document; without words in it, one word that is too long at the full size."""

    def kind(folder: Path, size: Size, draw: random.Random) -> Case:
        rows = ordinary(draw)
        long = text(draw, size.text)
        refused = () if words or size.text <= MOST_BYTES else ("never splits", "break its lines")
        name = draw.choice(("x.parquet", "x.jsonl", "x.txt"))
        if name != "x.txt":
            rows.insert(20, {"id": "long", "text": long})
            return Case(source=write(folder / name, rows), refused=refused, documents=41)
        write(folder / "a.jsonl", rows)
        (folder / name).write_text(long, encoding="utf-8")
        return Case(source=str(folder), refused=refused, documents=41)

    return kind


def _letters(draw: random.Random, count: int) -> str:
    """No space, no line, no punctuation: a sequence of bases, or Base64 on one line."""
    page = "".join(draw.choices("ACGT", k=20_011))
    return (page * (1 + count // len(page)))[:count]


def tiny_files(folder: Path, size: Size, draw: random.Random) -> Case:
    """A file for every sentence."""
    for number in range(size.files):
        (folder / f"{number:06d}.txt").write_text(f"Sentence {number} of {draw.choice(WORDS)}.")
    return Case(source=str(folder), documents=size.files)


def folder_under_the_glob(folder: Path, size: Size, draw: random.Random) -> Case:
    """A folder whose name the pattern matches, with documents in it."""
    for number, row in enumerate(ordinary(draw)):
        place = folder / ("more.txt" if number % 4 == 0 else ".")
        place.mkdir(exist_ok=True)
        (place / f"{number}.txt").write_text(row["text"])
    return Case(source=f"{folder}/*.txt", documents=30, skipped=("more.txt",))


def null_rows(folder: Path, size: Size, draw: random.Random) -> Case:
    """Rows without a text or an id: refused, or left out and counted where that is asked for."""
    rows = ordinary(draw)
    for row in rows[5:12]:
        row[draw.choice(("text", "id"))] = None
    source = write(folder / _name(draw), rows)
    if draw.random() < 0.5:
        return Case(source=source, refused=("found null", "skip_nulls=True"))
    return Case(source=source, options={"skip_nulls": True}, documents=33, dropped={"null": 7})


def dictionary_strings(folder: Path, size: Size, draw: random.Random) -> Case:
    """Texts as pandas writes categories, and as Polars writes strings."""
    rows = ordinary(draw)
    kind = draw.choice((pa.dictionary(pa.int32(), pa.string()), pa.string_view()))
    table = pa.Table.from_pylist([*rows, *({**row, "id": f"{row['id']}b"} for row in rows)])
    table = table.set_column(1, "text", table["text"].combine_chunks().cast(kind))
    if draw.random() < 0.5:
        pq.write_table(table, folder / "x.parquet")
    else:
        with pa.ipc.new_stream(str(folder / "x.arrow"), table.schema) as out:
            out.write_table(table)
    return Case(source=str(folder), documents=80)


_KINDS: dict[str, Kind] = {
    "a count of 2^62": _counted(lambda row: HUGE, "token_count"),
    "a negative count": _counted(lambda row: -HUGE, "token_count"),
    "a count that its text cannot have": _counted(
        lambda row: 100 * len(row["text"]), "row", "token_count"
    ),
    "a budget of 2^62": huge_budget,
    "a vocabulary of 2^62": huge_vocabulary,
    "a long document": _long(prose, words=True),
    "a long line of letters": _long(_letters),
    "equal characters": _long(lambda draw, count: "a" * count),
    "tiny files": tiny_files,
    "a folder under the glob": folder_under_the_glob,
    "null rows": null_rows,
    "dictionary strings": dictionary_strings,
}
KINDS = tuple(_KINDS)


def try_case(kind: str, folder: Path, size: Size, seed: int) -> dict[str, Any]:
    """Write the case, bring its graph up, and check all that must hold but memory.

    Raises:
        AssertionError: something does not hold.
    """
    source, store = folder / "source", str(folder / "store")
    source.mkdir(parents=True)
    case = _KINDS[kind](source, size, random.Random(seed))
    _begin_peak()
    began, cpu = time.monotonic(), time.process_time()
    line = _bring_up(case, store)
    figures = {
        "seconds": round(time.monotonic() - began, 1),
        "cpu_seconds": round(time.process_time() - cpu, 1),
        "peak_mb": _peak() >> 20,
    }
    if case.refused:
        assert line is not None, "was read"
        assert all(word in line for word in case.refused), f"{case.refused}: {line}"
        return {**figures, "line": line}
    assert line is None, line
    text, disk = _size(source), _size(Path(store))
    assert disk <= MOST_DISK * text + FIXED_DISK, f"{disk:,} bytes on disk for {text:,} of text"
    return {**figures, "text_bytes": text, "disk_bytes": disk}


def _bring_up(case: Case, store: str) -> str | None:
    """Sample, train a tokenizer, tokenise, and compare; what it was refused with, or None."""
    listed = list_source(case.source, 60.0)
    assert listed.skipped == case.skipped, f"{listed.skipped} are said not to be read"
    try:
        options = {"tokens": -1, **case.options}
        documents = steps.sample(case.source, **options)
        tokenizer = steps.train_tokenizer(documents, vocab_size=case.vocab_size)
        counted = steps.sample(case.source, tokenizer, **options)
        tokens = steps.tokenize(counted, tokenizer)
        bring_up(store, tokens)
    except (InputError, StepFailed) as error:
        return str(error)
    sampled, cache = (_published(store, node) for node in (counted, tokens))
    found = steps.Documents(*sampled)
    assert found.result["documents_kept"] == case.documents, found.result
    assert {k: v for k, v in found.result["dropped"].items() if v} == case.dropped, found.result
    result = steps.TokenCache(*cache).result["splits"]["train"]
    written = sum(
        len(text.as_py().encode())
        for _, file in found.files("train")
        for batch in read_table(file, ("text",))
        for text in batch.column("text")
    )
    assert (result["documents"], result["bytes"]) == (case.documents, written), result
    return None


def _published(store: str, node: Any) -> tuple[str, Any]:
    path = storage.join(store, as_node(node).directory)
    return path, load(path)


def _size(folder: Path) -> int:
    return sum(
        os.path.getsize(os.path.join(place, name))
        for place, _, names in os.walk(folder)
        for name in names
    )


def _begin_peak() -> None:
    """Begin the peak of memory anew, as far as the kernel lets a process."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def _peak() -> int:
    """Bytes of memory at the fullest moment since."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if "VmHWM" in line)


def small(seed: int, count: int, workspace: Path) -> dict[str, Any]:
    """Every kind in this process."""

    def trial(number: int) -> None:
        kind, folder = KINDS[pick(number, len(KINDS))], workspace / str(number)
        try:
            try_case(kind, folder, SMALL, number)
        except AssertionError as error:
            raise AssertionError(f"{kind}: {error}") from None
        shutil.rmtree(folder)

    return {"trials": trials(seed, count, trial), "kinds": min(count, len(KINDS))}


def full(seed: int, count: int, workspace: Path) -> dict[str, Any]:
    """Every kind in its full size, in a process of its own."""
    figures: dict[str, Any] = {}

    def trial(number: int) -> None:
        kind, folder = KINDS[pick(number, len(KINDS))], workspace / str(number)
        command = [sys.executable, "-m", "tests.faults.absurd_sources", kind, str(folder)]
        done = subprocess.run(
            [*command, str(number)], capture_output=True, text=True, check=False, timeout=SECONDS
        )
        shutil.rmtree(folder, ignore_errors=True)
        assert not done.returncode, f"{kind}: {done.stderr[-1000:]}"
        figures[kind] = json.loads(done.stdout.splitlines()[-1])
        peak = figures[kind]["peak_mb"]
        assert peak <= MOST_MEMORY >> 20, f"{kind}: a peak of {peak:,} MiB"

    return {"trials": trials(seed, count, trial), **figures}


FAULTS = {
    54: [
        Fault("absurd values in a source", len(KINDS), 4 * len(KINDS), small),
        Fault("absurd values in a source, of full size", 0, len(KINDS), full),
    ]
}

if __name__ == "__main__":
    print(json.dumps(try_case(sys.argv[1], Path(sys.argv[2]), FULL, int(sys.argv[3]))))  # noqa: T201
