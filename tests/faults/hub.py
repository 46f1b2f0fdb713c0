"""Faults of a remote source: the survey and the reading of all of it are what they would have been.

The clients are the real ones, `HfFileSystem` and gcsfs, only their waits between tries are made
short; the servers are `FakeHub` and `FakeGCS`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data.read import retry
from data.read.unit import SCORE
from data.read.work_units import Unit, list_units, read_unit
from data.select.document_hash import document_hash
from pipeline.errors import StorageError
from pipeline.store import storage
from tests.faults import remote
from tests.faults.fake_gcs import FakeGCS
from tests.faults.fake_gcs import Faults as GoogleFaults
from tests.faults.fake_hub import PASSING, FakeHub, Faults
from tests.faults.registry import Fault, trials

PATIENCE_SECONDS = 0.5
COLUMNS = ("id", "text", "token_count", "score")
FILES = 3
FAILING = tuple(kind for kind in PASSING if kind != "slow")


@contextlib.contextmanager
def quick_retries(patience: float | None = None) -> Iterator[None]:
    """Retries of ours and of the hub's client without their waits; `patience` in seconds."""
    from huggingface_hub.utils import _http

    limit = {} if patience is None else {retry.PATIENCE_VARIABLE: str(patience)}
    with (
        mock.patch.object(retry, "FIRST_WAIT_SECONDS", 0.001),
        mock.patch.object(retry, "LONGEST_WAIT_SECONDS", 0.01),
        mock.patch.object(_http, "time", SimpleNamespace(sleep=lambda _: time.sleep(0.001))),
        mock.patch.dict(os.environ, limit),
        remote.quick_retries(**({} if patience is None else {"give_up": patience})),
    ):
        logger = logging.getLogger("huggingface_hub")  # tells of every try
        level = logger.level
        logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            logger.setLevel(level)


def table(index: int, rows: int = 300) -> pa.Table:
    """The rows of file `index`: text that does not compress, of which some are not ASCII."""
    draw = random.Random(index)
    return pa.table(
        {
            "id": [f"<{index}-{row}>" for row in range(rows)],
            "text": [f"{draw.randbytes(100).hex()} 北京 {row}" for row in range(rows)],
            "token_count": pa.array([draw.randrange(1, 500) for _ in range(rows)], pa.int64()),
            "score": [draw.uniform(0, 5) for _ in range(rows)],
        }
    )


def content(index: int) -> bytes:
    """File `index`, of three row groups, without page checksums as on the hub."""
    sink = pa.BufferOutputStream()
    pq.write_table(table(index), sink, row_group_size=100)
    return sink.getvalue().to_pybytes()


def everything() -> pa.Table:
    """What reading all files gives."""
    return pa.concat_tables([table(index) for index in range(FILES)])


def read_all(units: list[Unit], columns: tuple[str, ...] = COLUMNS) -> pa.Table:
    """The rows of the units, in order."""
    own = [SCORE if name == "score" else name for name in columns]
    batches = [b for unit in units for b in read_unit(unit, own)]
    return pa.Table.from_batches(batches).rename_columns(list(columns))


def check_reading(source: str, target_bytes: int) -> None:
    """A survey and a reading of the source give what was written."""
    units = list_units(source, target_bytes=target_bytes)
    whole = everything()
    surveyed = read_all(units, ("id", "token_count"))
    assert surveyed.equals(whole.select(["id", "token_count"])), "the survey differs"
    expected = document_hash(whole["id"].to_pylist(), 0)
    assert np.array_equal(document_hash(surveyed["id"].to_pylist(), 0), expected)
    assert read_all(units).equals(whole), "the reading differs"


def failing_hub(seed: int, count: int, workspace: Path) -> dict[str, Any]:
    """Of all requests to the hub 20 % or 50 % fail: equal. All fail: an error in time."""
    del workspace
    figures: dict[str, Any] = {"runs": 0, "requests": 0, "faults": 0}
    files = {f"data/{index}.parquet": content(index) for index in range(FILES)}

    def trial(number: int) -> None:
        for probability in (0.2, 0.5):
            with FakeHub(files, redirect=bool(number % 2)) as hub, quick_retries():
                hub.faults = Faults(probability, seed=number)
                check_reading(f"{hub.source}/data/*.parquet", 1 << (10 + number % 8))
                figures["runs"] += 1
                figures["requests"] += len(hub.log)
                figures["faults"] += hub.injected()

    trials(seed, count, trial)
    with FakeHub(files) as hub:
        figures["down_s"] = _down(
            f"{hub.source}/data/*.parquet", lambda: setattr(hub, "faults", Faults(1.0, FAILING))
        )
    assert figures["faults"] > 0
    return figures


def failing_google(seed: int, count: int, workspace: Path) -> dict[str, Any]:
    """The same of gs://, whose client has its own retries."""
    del workspace
    figures: dict[str, Any] = {"runs": 0, "requests": 0, "faults": 0}
    source = "gs://bucket/data/*.parquet"

    def trial(number: int) -> None:
        for probability in (0.2, 0.5):
            with FakeGCS() as server, quick_retries():
                _fill()
                before = len(server.log)
                server.faults = GoogleFaults(probability, seed=number)
                check_reading(source, 1 << (10 + number % 8))
                figures["runs"] += 1
                figures["requests"] += len(server.log) - before
                figures["faults"] += sum(s in (0, 429, 500, 503) for *_, s in server.log)

    trials(seed, count, trial)
    with FakeGCS() as server:
        _fill()
        figures["down_s"] = _down(
            source, lambda: setattr(server, "faults", GoogleFaults(1.0, ("503", "reset", "short")))
        )
    assert figures["faults"] > 0
    return figures


def _fill() -> None:
    for index in range(FILES):
        storage.write_atomic(f"gs://bucket/data/{index}.parquet", content(index))


def _down(source: str, break_it: Callable[[], None]) -> float:
    """With no request answered, listing and reading end in a typed error in time; the slowest."""
    units = list_units(source)
    slowest = 0.0
    attempts: tuple[Callable[[], Any], ...] = (lambda: read_all(units), lambda: list_units(source))
    with quick_retries(PATIENCE_SECONDS):
        break_it()
        for attempt in attempts:
            begun = time.monotonic()
            raised: Exception | None = None
            try:
                attempt()
            except StorageError as error:
                raised = error
            seconds = time.monotonic() - begun
            assert raised is not None, "read from a store that does not answer"
            words = str(raised)
            assert source.rpartition("/")[0] in words, words
            assert "times in" in words or "no answer" in words, words
            assert seconds < 4 * PATIENCE_SECONDS, f"{seconds:.1f} s"
            slowest = max(slowest, seconds)
    return round(slowest, 2)


FAULTS = {
    22: [
        Fault("failing requests to hf://, source", 1, 20, failing_hub),
        Fault("failing requests to gs://, source", 1, 20, failing_google),
    ]
}
