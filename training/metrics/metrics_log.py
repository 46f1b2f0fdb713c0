"""Writes and reads `metrics.jsonl`, the only record of a run's metrics, events and times.

Each line is a JSON object: `kind` ("config", "began", "time", "step", "evaluation", "sample",
"sequences", "forecast" or the name of an event), `time` (Unix) and fields: see `recorder` for a
step, `goodput` for a time, `differences` for the sequences of a run's last evaluation. Process 0
encodes a line immediately and a thread appends it within a second, so the training loop never
blocks on a disk or store.

The history of a run is the log of every attempt up to the checkpoint that the next one resumed
from. A checkpoint holds no lines but a `Segment` per attempt, and is recorded after those bytes are
stored. Later lines stay in the file but are not part of the history.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from pipeline.errors import CorruptOutput, InputError
from pipeline.store import append, storage
from pipeline.store.append import Appender
from pipeline.store.decode import json_line

logger = logging.getLogger(__name__)

Entry = dict[str, Any]
Segment = tuple[str, int]
"""A directory with a metrics log, and how many bytes of the log belong to the history."""

NAME = "metrics.jsonl"
TABLES = {
    "history": "step",
    "evaluations": "evaluation",
    "samples": "sample",
    "sequences": "sequences",
    "forecasts": "forecast",
}
"""Tables of a run, and the `kind` of the entries that are their rows."""
MEASURED = frozenset(
    {
        "seconds",
        "data_wait",
        "tokens_per_second",
        "tokens_per_second_average",
        "useful_tokens_per_second",
        "mfu",
        "mfu_full",
        "hfu",
        "memory_bytes",
    }
)
"""Columns that depend on the machine and its clock; the others are the same in a repeated run."""
_OLD_PART = re.compile(r"metrics\.[0-9]{15}\.jsonl")  # in object stores, of earlier versions
_READ_BYTES = 1 << 20


def log_files(directory: str) -> list[tuple[str, int]]:
    """URL and size of the files of the metrics log in a directory, in order."""
    if found := append.objects(storage.join(directory, NAME)):
        return found
    old = [name for name in storage.list_names(directory) if _OLD_PART.fullmatch(name)]
    urls = [storage.join(directory, name) for name in old]
    return [(url, storage.size(url) or 0) for url in urls]


def read_log(
    directory: str, end: int | None = None, kinds: Collection[str] | None = None
) -> Iterator[Entry]:
    """The entries of one attempt's metrics log, or those of some kinds; none without a log.

    Skips an incomplete last line, which a kill leaves. Reads `end` bytes if given, and raises
    `CorruptOutput` where there are fewer.
    """
    # The kind is a line's first field: other lines are skipped without parsing them.
    begins = None if kinds is None else tuple(f'{{"kind": "{kind}"'.encode() for kind in kinds)
    incomplete, found = b"", 0
    for data in _read(directory):
        data = data if end is None else data[: end - found]
        found += len(data)
        *lines, incomplete = (incomplete + data).split(b"\n")
        for line in lines:
            if begins is None or line.startswith(begins):
                yield parse(line)
        if found == end:
            return
    if end is not None:
        _check_size(directory, found, end)


def parse(line: bytes) -> Entry:
    """An entry from its line; null stands for a number of a row that is not finite."""
    entry = json.loads(line)
    if entry.get("kind") in ("step", "evaluation"):
        return {name: math.nan if value is None else value for name, value in entry.items()}
    return entry


def _check_size(directory: str, found: int, expected: int) -> None:
    if found < expected:
        raise CorruptOutput(
            f"{storage.join(directory, NAME)}: expected {expected:,} bytes of the run's history, "
            f"found {found:,}; put the file back"
        )


def _read(directory: str) -> Iterator[bytes]:
    read = 0
    for url, _ in log_files(directory):
        try:
            with storage.open_read(url) as file:
                while data := file.read(_READ_BYTES):
                    read += len(data)
                    yield data
        except FileNotFoundError:  # parts of a log that still grows were merged
            yield append.Tail(storage.join(directory, NAME), read).more()
            return


def read_history(
    history: Sequence[Segment], kinds: Collection[str] = frozenset(TABLES.values())
) -> Iterator[Entry]:
    """The entries of a run's history in order, the same as of an uninterrupted run.

    Raises `CorruptOutput` where a log is shorter than its segment.
    """
    for directory, end in history:
        yield from read_log(directory, end, kinds)


def check_history(history: Sequence[Segment]) -> None:
    """Raise `CorruptOutput` when a log is shorter than its segment; reads no entries."""
    for directory, end in history:
        _check_size(directory, sum(size for _, size in log_files(directory)), end)


def plain(entry: Mapping[str, Any]) -> Entry:
    """The fields of an entry that its writer passed: all except `kind` and `time`."""
    return {name: value for name, value in entry.items() if name not in ("kind", "time")}


def tables(entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    found: dict[str, list[Entry]] = {kind: [] for kind in TABLES.values()}
    for entry in entries:
        if entry["kind"] in found:
            found[entry["kind"]].append(plain(entry))
    return {name: found[kind] for name, kind in TABLES.items()}


def write_history(directory: str, history: Sequence[Segment], attempts: Iterable[Entry]) -> None:
    """Write the whole history of a run as one metrics log, and the times of all its attempts."""
    with storage.open_write(storage.join(directory, NAME)) as file:
        for entry in read_history(history):
            file.write(json_line(entry))
        for attempt in attempts:
            file.write(json_line({"kind": "attempt", **attempt}))


def content_of(history: Sequence[Segment]) -> str:
    """Hex SHA-256 of a run's steps without the columns of `MEASURED`.

    Evaluations and samples are not part of what was trained.
    """
    found = hashlib.sha256()
    for entry in read_history(history, ["step"]):
        row = {name: value for name, value in plain(entry).items() if name not in MEASURED}
        found.update(json.dumps(row, sort_keys=True).encode() + b"\n")
    return found.hexdigest()


def to_relative(history: Sequence[Segment], base: str) -> list[list[Any]]:
    """A history with directories relative to `base`, so that both can move together."""
    here = _parts(base)
    return [["/".join(_relative(_parts(directory), here)), end] for directory, end in history]


def from_relative(history: Sequence[Sequence[Any]], base: str) -> tuple[Segment, ...]:
    found, here = [], _parts(base)
    for reference, end in history:
        parts = reference.split("/")
        up = parts.count("..")
        found.append(("/".join([*here[: len(here) - up], *parts[up:]]), int(end)))
    return tuple(found)


def _relative(there: list[str], here: list[str]) -> list[str]:
    pairs = zip(here, there, strict=False)
    common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    return [*[".."] * (len(here) - common), *there[common:]]


def _parts(url: str) -> list[str]:
    return storage.normalise(url).split("/")


EVERY_SECONDS = 1.0
TIMES_SECONDS = 10.0
_COPY_LINES = 10_000


class MetricsLog:
    """Appends entries to the metrics log of one attempt, in a directory without one.

    `times` gives the fields of the row of kind "time", which a thread writes every ten seconds; it
    appends after `every` seconds.
    """

    def __init__(
        self,
        directory: str,
        times: Callable[[], Mapping[str, Any]] | None = None,
        every: float = EVERY_SECONDS,
    ) -> None:
        self._url = storage.join(directory, NAME)
        if log_files(directory):
            raise InputError(f"{self._url}: exists already; give every attempt its own name")
        self._directory, self._times, self._every = directory, times, every
        self._file = Appender(self._url).__enter__()
        self._lock, self._appending = threading.Lock(), threading.Lock()
        self._pending: list[bytes] = []  # lines that are not yet in the file
        self._bytes = 0  # of all lines, pending ones included
        self._before: tuple[Segment, ...] = ()
        self._failing = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="metrics", daemon=True)
        self._thread.start()

    @property
    def path(self) -> str:
        """The local file; its last line may be incomplete."""
        return self._file.path

    def write(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Add an entry without blocking; `pipeline.store.decode.json_line` encodes it."""
        line = json_line({"kind": kind, "time": round(time.time(), 3), **fields})
        with self._lock:
            self._pending.append(line)
            self._bytes += len(line)

    def resume(self, history: Sequence[Segment]) -> None:
        """Set the run's history so far, which earlier attempts wrote."""
        self._before = tuple(history)

    def copy(self, history: Sequence[Segment]) -> None:
        """Copy the history of another run, so that this run does not depend on its files.

        Without its forecast, which is of the end of that run.
        """
        for entry in read_history(history, {*TABLES.values()} - {"forecast"}):
            self.write(entry.pop("kind"), entry)
            if len(self._pending) > _COPY_LINES:
                self.flush()

    @property
    def history(self) -> tuple[Segment, ...]:
        """The run's history until now; `flush` stores the part that is still pending."""
        return (*self._before, (self._directory, self._bytes))

    def append(self, *, durable: bool = False) -> None:
        """Append every entry written so far to the local file; if `durable`, store it.

        An `OSError` of the disk or the store keeps the entries for the next call.
        """
        with self._appending:
            with self._lock:
                data, self._pending = b"".join(self._pending), []
            self._file.write(data)
            if durable:
                self._file.flush()

    def flush(self) -> None:
        """Store every entry written so far; raises as `append` does."""
        self.append(durable=True)

    def close(self, seconds: float) -> None:
        """Store pending entries and end the thread; abandon it after `seconds`."""
        self._closed.set()
        self._thread.join(seconds)
        if self._thread.is_alive() or self._failing:
            logger.warning("%s: the last metrics were not stored", self._directory)

    def _work(self) -> None:
        next_times, closed = time.monotonic() + TIMES_SECONDS, False
        while not closed:
            closed = self._closed.wait(self._every)
            if not closed and self._times is not None and time.monotonic() >= next_times:
                self.write("time", self._times())
                next_times += TIMES_SECONDS
            try:
                self.append()
                self._failing = False
            except Exception as error:  # noqa: BLE001 - only `flush` raises, before a checkpoint
                if not self._failing:
                    logger.warning("%s: not written, will be retried: %s", self._url, error)
                self._failing = True
        self._file.close()
