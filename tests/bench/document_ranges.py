"""Reading Parquet by range from the hub: our requests beside those of `HfFileSystem`'s own file.

    python -m tests.bench.document_ranges [--trials 40] [--seconds 60]

The server is `tests.faults.fake_hub`, in this process. Both sides use the hub's real client and
give Arrow a file without read-ahead. One JSON object a line:

- `requests`: requests and bytes to read two columns of three files of three row groups each; for
  the client's file also as it is opened by default.
- `changed`: what a read gives of a file that was replaced after it was opened.
- `faults`: of so many reads of a file in which every third request fails in a way that passes, how
  many gave the file's rows, other rows, or an error. Waits between tries are made short.
- `abort`: of so many footers with one bit changed, those for which Arrow ends the process when it
  is asked for the sizes of all columns.
- `holders`: of reads whose file Arrow's late threads may be the last to hold (which ends a
  process that is exiting, apache/arrow#34314), those in which one was, with `arrow_file` and
  with pyarrow's own file; Linux only.
- `unavailable`: seconds and requests until a read fails whose server answers 503, with a deadline
  of `--seconds` for ours (PONENTE_SOURCE_SECONDS); the client has no such setting.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq

from data.read import parquet_file
from data.read.parquet_file import open_parquet
from data.read.retry import PATIENCE_VARIABLE
from tests.data.read.test_parquet_table import LAST_HOLDERS, write
from tests.faults.fake_hub import FakeHub, Faults
from tests.faults.hub import FAILING, content, quick_retries

_COLUMNS = ["id", "token_count"]
# Forks a child per footer, before any thread exists, and counts those that a signal ended.
_ABORTS = """
import io, os, random, sys
import pyarrow as pa, pyarrow.parquet as pq

whole, ended = io.BytesIO(), 0
pq.write_table(pa.table({"id": ["a", "b"], "text": ["one", "two"]}), whole, row_group_size=1)
data = whole.getvalue()
size = int.from_bytes(data[-8:-4], "little")
for seed in range(int(sys.argv[1])):
    chance, flipped = random.Random(seed), bytearray(data)
    flipped[len(data) - 8 - size + chance.randrange(size)] ^= 1 << chance.randrange(8)
    child = os.fork()
    if child == 0:
        try:
            footer = pq.ParquetFile(pa.BufferReader(bytes(flipped))).metadata
            for group in range(footer.num_row_groups):
                for column in range(footer.num_columns):
                    footer.row_group(group).column(column).total_compressed_size
        except Exception:
            pass
        os._exit(0)
    ended += os.WIFSIGNALED(os.waitpid(child, 0)[1])
print(ended)
"""


def ours(url: str, columns: list[str] | None = None) -> pa.Table:
    """The columns of a file as sources are read here."""
    with open_parquet(url) as file:
        return file.read(columns)


def clients(url: str, columns: list[str] | None = None, **options: Any) -> pa.Table:
    """The same by the file of the hub's client."""
    from huggingface_hub import HfFileSystem

    fs = HfFileSystem(**json.loads(os.environ["FSSPEC_HF"]), skip_instance_cache=True)
    with fs.open(url, **(options or {"cache_type": "none"})) as file:
        return pq.ParquetFile(file, pre_buffer=True).read(columns)


_READERS: dict[str, Callable[..., pa.Table]] = {
    "ours": ours,
    "HfFileSystem": clients,
    "HfFileSystem, default cache": lambda *args: clients(*args, cache_type="readahead"),
}


def requests() -> None:
    """What is asked for when nothing fails."""
    files = {f"{index}.parquet": content(index) for index in range(3)}
    for name, read in _READERS.items():
        with FakeHub(files) as hub:
            for file in files:
                read(f"{hub.source}/{file}", _COLUMNS)
            sent = [r for file in files for r in hub.ranges_of(file)]
            received = sum(stop - start for start, stop in sent)
            emit("requests", name, requests=len(hub.log), ranges=len(sent), bytes=received)


def faults(trials: int) -> None:
    """Rows that arrive though requests fail."""
    right = pq.read_table(pa.BufferReader(content(0)))
    for name in ("ours", "HfFileSystem"):
        found = {"right": 0, "wrong": 0, "error": 0}
        for seed in range(trials):
            parquet_file._footer.cache_clear()
            with FakeHub({"0.parquet": content(0)}) as hub, quick_retries():
                hub.faults = Faults(1 / 3, FAILING, seed)
                try:
                    same = _READERS[name](f"{hub.source}/0.parquet").equals(right)
                    found["right" if same else "wrong"] += 1
                except Exception:  # noqa: BLE001 - any error of either
                    found["error"] += 1
        emit("faults", name, trials=trials, **found)


def unavailable(seconds: float) -> None:
    """How long a store that does not answer takes to be reported."""
    for name in ("ours", "HfFileSystem"):
        error = "none"
        with FakeHub({"0.parquet": content(0)}) as hub, patience(seconds):
            hub.faults = Faults(1.0, ("503",), only="resolve")
            began = time.perf_counter()
            try:
                _READERS[name](f"{hub.source}/0.parquet", _COLUMNS)
            except Exception as found:  # noqa: BLE001 - any error of either
                error = f"{type(found).__name__}: {found}"[:200]
            took = round(time.perf_counter() - began, 1)
        emit("unavailable", name, seconds=took, requests=len(hub.log), error=error)


def changed() -> None:
    """A file that is replaced while it is read."""
    from data.read.byte_ranges import file_state, open_ranges

    before, after = content(0), content(7)
    for name in ("ours", "HfFileSystem"):
        with FakeHub({"0.parquet": before}) as hub:
            url = f"{hub.source.split('@')[0]}@main/0.parquet"
            if name == "ours":
                file = open_ranges(url, file_state(url))
            else:
                from huggingface_hub import HfFileSystem

                fs = HfFileSystem(**json.loads(os.environ["FSSPEC_HF"]), skip_instance_cache=True)
                file = fs.open(url, cache_type="none")
            with file:
                file.read(1000)
                hub.files["0.parquet"] = after
                try:
                    found = file.read(1000)
                    what = "bytes of the new file" if found == after[1000:2000] else "other bytes"
                except Exception as error:  # noqa: BLE001 - any error of either
                    what = f"{type(error).__name__}: {error}"[:160]
            emit("changed", name, found=what)


def aborts(trials: int) -> None:
    """Footers that end a process."""
    command = [sys.executable, "-c", _ABORTS, str(trials)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
    emit("abort", f"pyarrow {pa.__version__}", footers=trials, aborted=int(done.stdout))


_PLAIN = """
import contextlib
import pyarrow as pa
from data.read import parquet_file, parquet_table

@contextlib.contextmanager
def plain(handle):
    yield pa.PythonFile(handle, mode="r")

parquet_table.arrow_file = parquet_file.arrow_file = plain
"""


def holders(rounds: int) -> None:
    """Files that a thread of Arrow's was the last to hold."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "x.parquet")
        write(path)
        for name, before in (("arrow_file", ""), ("pa.PythonFile", _PLAIN)):
            command = [sys.executable, "-c", before + LAST_HOLDERS, str(path), "a source's"]
            reads = late = 0
            for _ in range(rounds):
                done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
                found = list(map(int, done.stdout.split()))
                reads, late = reads + found[0], late + found[1]
            emit("holders", name, reads=reads, late=late)


def patience(seconds: float) -> Any:
    """Our deadline."""
    return mock.patch.dict(os.environ, {PATIENCE_VARIABLE: str(seconds)})


def emit(measure: str, name: str, **found: Any) -> None:
    """One line."""
    print(json.dumps({"measure": measure, "name": name, **found}), flush=True)


def main() -> None:
    """Measure and print."""
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("--trials", type=int, default=40)
    flags.add_argument("--seconds", type=float, default=60.0)
    options = flags.parse_args()
    requests()
    changed()
    faults(options.trials)
    aborts(25 * options.trials)
    holders(options.trials // 2)
    unavailable(options.seconds)


if __name__ == "__main__":
    main()
