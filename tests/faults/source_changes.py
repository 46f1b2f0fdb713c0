"""A source whose content changes under its name, on every store: never the old answer for new data.

Each trial samples a small corpus, does one thing to it, and plans and runs again. What is then
published holds the documents that are there now, and `plan` said beforehand what changed, or that
nothing did.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from data.read.parquet_table import read_table
from pipeline.graph.step import as_node
from pipeline.plan.plan import Planned, plan
from pipeline.store import storage
from pipeline.store.manifest import load
from pipeline.store.outputs import Store
from steps.artifacts import Documents
from steps.documents.sample import sample
from tests.faults.fake_gcs import FakeGCS
from tests.faults.fake_hub import FakeHub
from tests.faults.hub import quick_retries
from tests.faults.registry import Fault, pick, trials
from tests.pipeline.helpers import check_invariants, executed

Files = dict[str, bytes]


def _content(draw: random.Random) -> bytes:
    rows = draw.randrange(5, 40)
    table = pa.table(
        {
            "id": [f"{draw.randrange(1 << 60):x}" for _ in range(rows)],
            "text": [f"text {draw.randrange(1 << 30)}" for _ in range(rows)],
            "token_count": pa.array([3] * rows, pa.int64()),
        }
    )
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    return sink.getvalue().to_pybytes()


def _ids(files: Files) -> set[str]:
    tables = [pq.read_table(pa.BufferReader(data)) for data in files.values()]
    return {name for table in tables for name in table["id"].to_pylist()}


class _Local:
    """Files of a folder, named by a relative path."""

    def __init__(self, workspace: Path) -> None:
        self._top = workspace

    @contextlib.contextmanager
    def serve(self) -> Iterator[None]:
        before = Path.cwd()
        self._top.mkdir()
        os.chdir(self._top)
        try:
            yield
        finally:
            os.chdir(before)

    def put(self, folder: str, files: Files) -> str:
        """The source of these files, which replace all that the folder has."""
        shutil.rmtree(self._top / folder, ignore_errors=True)
        (self._top / folder).mkdir(parents=True)
        for name, data in files.items():
            (self._top / folder / name).write_bytes(data)
        return f"./{folder}/*.parquet"

    def elsewhere(self, files: Files) -> str:
        """The same relative path from another folder."""
        os.chdir(self._top.parent)
        self._top = self._top.parent / f"{self._top.name}-other"
        self._top.mkdir()
        os.chdir(self._top)
        return self.put("docs", files)


class _Bucket:
    """Objects of a bucket."""

    def __init__(self, workspace: Path) -> None:
        pass

    @contextlib.contextmanager
    def serve(self) -> Iterator[None]:
        with FakeGCS(), quick_retries():
            yield

    def put(self, folder: str, files: Files) -> str:
        """As `_Local.put`."""
        storage.delete_tree(f"gs://bucket/{folder}")
        for name, data in files.items():
            storage.write_atomic(f"gs://bucket/{folder}/{name}", data)
        return f"gs://bucket/{folder}/*.parquet"

    def elsewhere(self, files: Files) -> str:
        """The same name in another folder."""
        return self.put("other/docs", files)


class _Hub:
    """The branch of a repository; what is written moves it."""

    def __init__(self, workspace: Path) -> None:
        self._hub = FakeHub({})

    @contextlib.contextmanager
    def serve(self) -> Iterator[None]:
        with self._hub, quick_retries():
            yield

    def put(self, folder: str, files: Files) -> str:
        """As `_Local.put`."""
        for name in [n for n in self._hub.files if n.startswith(folder + "/")]:
            del self._hub.files[name]
        self._hub.files |= {f"{folder}/{name}": data for name, data in files.items()}
        self._hub.head = f"{random.getrandbits(160):040x}"
        return f"hf://datasets/owner/name/{folder}/*.parquet"

    def elsewhere(self, files: Files) -> str:
        """The same name in another folder."""
        return self.put("other/docs", files)


Place = _Local | _Bucket | _Hub
# Gives the source to read afterwards, its files, and the words of the reason; None for a hit.
Change = Callable[[Place, Files, random.Random], tuple[str, Files, list[str] | None]]


def replaced(place: Place, files: Files, draw: random.Random) -> Any:
    """Another file under the name."""
    files = {**files, "a.parquet": _content(draw)}
    return place.put("docs", files), files, ["source changed: ", "a.parquet"]


def added(place: Place, files: Files, draw: random.Random) -> Any:
    """One more file that the pattern matches."""
    files = {**files, "c.parquet": _content(draw)}
    return place.put("docs", files), files, ["source changed: ", "+ c.parquet"]


def removed(place: Place, files: Files, draw: random.Random) -> Any:
    """One file less."""
    files = {"a.parquet": files["a.parquet"]}
    return place.put("docs", files), files, ["source changed: ", "- b.parquet"]


def other_folder(place: Place, files: Files, draw: random.Random) -> Any:
    """The same relative path, seen from another folder."""
    files = {"a.parquet": _content(draw)}
    return place.elsewhere(files), files, []


def written_again(place: Place, files: Files, draw: random.Random) -> Any:
    """The same bytes: another time of change, generation or commit."""
    return place.put("docs", files), files, None


def moved(place: Place, files: Files, draw: random.Random) -> Any:
    """The same files in another folder, and the first one with others."""
    source = place.put("moved", files)
    place.put("docs", {"a.parquet": _content(draw)})
    return source, files, None


CHANGES: tuple[Change, ...] = (replaced, added, removed, other_folder, written_again, moved)
PLACES: tuple[type[Place], ...] = (_Local, _Bucket, _Hub)


def changed_sources(seed: int, count: int, workspace: Path) -> dict[str, Any]:
    """Six kinds of change on three kinds of store."""
    seen = {"noticed": 0, "reused": 0}

    def trial(number: int) -> None:
        draw = random.Random(number)
        kind = pick(number, len(CHANGES) * len(PLACES))
        change, place = CHANGES[kind % len(CHANGES)], PLACES[kind // len(CHANGES)]
        where = f"{change.__name__} on {place.__name__}"
        store = str(workspace / f"store-{number}")
        corpus = place(workspace / f"corpus-{number}")
        with corpus.serve():
            files = {"a.parquet": _content(draw), "b.parquet": _content(draw)}
            source = corpus.put("docs", files)
            executed(store, sample(source, tokens=-1))
            source, files, said = change(corpus, files, draw)
            graph = sample(source, tokens=-1)
            before = _plan(store, graph)
            ran = executed(store, graph)
            assert _published(store, graph) == _ids(files), f"{where}: old documents"
            assert (before.status == "hit") == (said is None), f"{where}: {before}"
            assert all(word in before.reason for word in said or ()), f"{where}: {before.reason}"
            if place is _Hub and said:
                assert "moved main from" in before.reason, f"{where}: {before.reason}"
            assert ran == ([] if said is None else ["sample"]), f"{where}: ran {ran}"
            assert _plan(store, graph).status == "hit", where
        check_invariants(store)
        seen["reused" if said is None else "noticed"] += 1

    return {"trials": trials(seed, count, trial), **seen}


def _plan(store: str, graph: Any) -> Planned:
    (entry,) = plan([as_node(graph)], Store(store))
    return entry


def _published(store: str, graph: Any) -> set[str]:
    path = storage.join(store, as_node(graph).directory)
    found = load(path)
    assert found is not None
    files = Documents(path, found).files("train")
    return {row["id"] for _, f in files for batch in read_table(f) for row in batch.to_pylist()}


KINDS = len(CHANGES) * len(PLACES)
FAULTS = {46: [Fault("source changed under its name", KINDS, 20 * KINDS, changed_sources)]}
