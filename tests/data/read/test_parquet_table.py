"""Our own Parquet files are read as written or not at all."""

import gc
import os
import random
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.read import parquet_table
from pipeline.errors import CorruptOutput

ROOT = Path(__file__).parents[3]
SCHEMA = pa.schema([("id", pa.string()), ("text", pa.string())])


def batches(count):
    """`count` batches of 100 rows with text that compresses poorly."""
    numbers = random.Random(0)
    for start in range(0, 100 * count, 100):
        texts = [format(numbers.getrandbits(400), "x") for _ in range(100)]
        yield pa.record_batch(
            {"id": [f"d{start + i}" for i in range(100)], "text": texts}, schema=SCHEMA
        )


def write(url, count=5, parts=None):
    with parquet_table.TableWriter(str(url), SCHEMA) as writer:
        for batch in parts or batches(count):
            writer.write(batch)


def test_round_trip_and_projection(tmp_path):
    """Rows come back in order, and only the columns asked for."""
    write(tmp_path / "new" / "x.parquet")
    expected = pa.Table.from_batches(batches(5))
    url = str(tmp_path / "new" / "x.parquet")
    assert pa.Table.from_batches(parquet_table.read_table(url)).equals(expected)
    only = pa.Table.from_batches(parquet_table.read_table(url, ["id"]))
    assert only.equals(expected.select(["id"]))


def test_row_groups_are_cut_by_bytes(tmp_path, monkeypatch):
    """A row group is closed when its batches reach the limit."""
    monkeypatch.setattr(parquet_table, "_ROW_GROUP_BYTES", 2 * next(batches(1)).nbytes)
    write(tmp_path / "x.parquet", 5)
    metadata = pq.ParquetFile(tmp_path / "x.parquet").metadata
    assert [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)] == [
        200,
        200,
        100,
    ]


def interrupted():
    """Two batches and an error."""
    yield from batches(2)
    raise RuntimeError("interrupted")


def test_a_body_that_raises_leaves_no_readable_file(tmp_path, monkeypatch):
    """An interrupted write cannot be mistaken for a finished one, though rows were written."""
    monkeypatch.setattr(parquet_table, "_ROW_GROUP_BYTES", 1)
    url = str(tmp_path / "x.parquet")
    with pytest.raises(RuntimeError, match="interrupted"):
        write(url, parts=interrupted())
    gc.collect()
    assert (tmp_path / "x.parquet").stat().st_size > 5000
    with pytest.raises(CorruptOutput, match=r"x\.parquet"):
        list(parquet_table.read_table(url))


def test_no_flipped_bit_and_no_cut_reads_as_other_rows(tmp_path):
    """150 flips and 50 truncations: every one is the same rows or an error that names the file."""
    path = tmp_path / "x.parquet"
    write(path, 3)
    good, expected = path.read_bytes(), pa.Table.from_batches(batches(3)).to_pylist()
    numbers, errors = random.Random(1), 0
    for trial in range(200):
        damaged = bytearray(good)
        if trial < 150:
            damaged[numbers.randrange(len(good))] ^= 1 << numbers.randrange(8)
        else:
            del damaged[numbers.randrange(len(good)) :]
        path.write_bytes(damaged)
        try:
            found = pa.Table.from_batches(parquet_table.read_table(str(path))).to_pylist()
        except CorruptOutput as damaged:
            found, message = None, str(damaged)
        if found is None:
            assert "x.parquet" in message
            errors += 1
        else:
            assert found == expected
    assert errors > 180


def test_a_missing_file_is_damage(tmp_path):
    """A file that the caller knows was written is damaged when it is gone."""
    with pytest.raises(CorruptOutput, match=r"gone\.parquet"):
        list(parquet_table.read_table(str(tmp_path / "gone.parquet")))


def test_a_failing_disk_is_not_called_damage():
    """An error with a number is the system's and is left as it is."""
    assert not parquet_table.is_corrupt(OSError(5, "Input/output error"))
    assert not parquet_table.is_corrupt(ConnectionError("reset"))
    assert parquet_table.is_corrupt(OSError("Corrupt snappy compressed data."))


# Threads may end between their listing and the call.
MAKE_THREADS_LATE = """
import contextlib, os

def make_threads_late():
    core = {min(os.sched_getaffinity(0))}
    for thread in map(int, os.listdir("/proc/self/task")):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(thread, core)
            if thread != os.getpid():
                os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))

"""

LAST_HOLDERS = (
    MAKE_THREADS_LATE
    + """
import io, os, sys, threading
from data.read import parquet_table, work_units
from pipeline.store import storage

ended = []

class File(io.FileIO):
    def __del__(self):
        ended.append(threading.get_native_id())
        super().__del__()

storage.open_read = File
unit, = work_units.list_units(sys.argv[1])
read = {
    "ours": lambda: parquet_table.read_table(sys.argv[1], ["id"]),
    "a source's": lambda: work_units.read_unit(unit, ["id"]),
}[sys.argv[2]]
list(read())
here = os.getpid()
make_threads_late()
ended.clear()
for _ in range(150):
    list(read())
print(len(ended), sum(thread != here for thread in ended))
"""
)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="makes Arrow's threads late by Linux")
@pytest.mark.parametrize("whose", ["ours", "a source's"])
def test_no_thread_of_arrows_is_the_last_to_hold_a_file(tmp_path, whose):
    """One that was, while Python ended, aborted a process whose work was done."""
    write(tmp_path / "x.parquet")
    command = [sys.executable, "-c", LAST_HOLDERS, str(tmp_path / "x.parquet"), whose]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.split() == ["150", "0"], done.stdout + done.stderr


LATE_BLOCKS = (
    MAKE_THREADS_LATE
    + """
import os, sys
from data.read import arrow_file, parquet_table

read = lambda: list(parquet_table.read_table(sys.argv[1], ["id"]))
read()
make_threads_late()
late = after = reads = 0
while reads < 300 or (late == 0 and reads < 6000):
    read()
    reads += 1
    late += bool(arrow_file._blocks)
    arrow_file._let_go()
    after += bool(arrow_file._blocks)
print(late, after)
"""
)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="makes Arrow's threads late by Linux")
def test_blocks_that_arrows_threads_hold_are_waited_for(tmp_path):
    """They hold some for a while after the rows are there; never after the wait."""
    write(tmp_path / "x.parquet")
    command = [sys.executable, "-c", LATE_BLOCKS, str(tmp_path / "x.parquet")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    late, after = map(int, done.stdout.split())
    assert after == 0
    if late == 0:
        pytest.skip("what else the machine did kept every thread of Arrow's in time")


HELD_AT_THE_END = """
import atexit, io, threading, time
atexit.register(lambda: print(len(arrow_file._blocks), time.monotonic() - began >= 0.3))
from data.read import arrow_file

blocks = [arrow_file._Counted(io.BytesIO(b"x")).read()]
began = time.monotonic()
threading.Thread(target=lambda: (time.sleep(0.3), blocks.clear()), daemon=True).start()
"""


@pytest.mark.slow
def test_a_process_ends_when_no_block_is_held():
    """A thread lets go of one while Python waits to end."""
    command = [sys.executable, "-c", HELD_AT_THE_END]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout.split()) == (0, ["0", "True"]), done.stderr
