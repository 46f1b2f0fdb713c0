"""A disk that fails at a chosen operation, under one life of a process.

A `Life` watches one directory. Every write, fsync, link, replace, unlink, mkdir, rmdir and opening
for writing below it is an operation, numbered from 1 (readings too when asked). At the chosen
number the operation fails: before it is done, torn (half of the bytes reach the file), or after it
is done; with an I/O error, or with `Killed`, after which nothing this life tries to do is done any
more, not by its `finally` blocks and not by its threads. The next life is another process to the
leases: the killed one is dead to it.

What a life read and wrote is kept, for the checks.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import itertools
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

from pipeline.store import process

_WRITES = ("link", "replace", "rename", "symlink", "unlink", "remove", "mkdir", "rmdir", "truncate")
_SYNCS = ("fsync", "fdatasync")
_READS = ("stat", "lstat", "scandir", "listdir")
_TARGET_SECOND = ("link", "replace", "rename", "symlink")
_LIVES = itertools.count(1)
_LONGEST_SLEEP = 0.002


class Killed(BaseException):
    """The life is over; like the process's end, no `except Exception` sees it."""


@dataclass(frozen=True)
class Trouble:
    """What goes wrong, and when.

    Attributes:
        at: number of the operation that fails.
        mode: "before", "torn" (of a write; else as "before") or "after" it is done.
        error: makes the error from the path; None kills the life.
        sticky: whether every later operation fails too, except `spared` kinds.
    """

    at: int
    mode: str = "before"
    error: Callable[[str], OSError] | None = None
    sticky: bool = False
    spared: tuple[str, ...] = ()


@dataclass(frozen=True)
class Operation:
    """One thing done to the disk: what, and to which path."""

    kind: str
    path: str


class Life:
    """One life of a process on a faulty disk; a context manager, used once.

    Args:
        root: the directory that is watched; an absolute path.
        trouble: what goes wrong; None for an undisturbed life.
        count_reads: whether readings are operations too.
        delay: seconds every operation takes longer, so that a real kill can fall between any two.
    """

    def __init__(
        self,
        root: str,
        trouble: Trouble | None = None,
        *,
        count_reads: bool = False,
        delay: float = 0.0,
    ) -> None:
        self.root = root.rstrip("/")
        self.trouble = trouble
        self.operations: list[Operation] = []
        self.read: set[str] = set()
        self.written: set[str] = set()
        self.dead = False
        self.struck = False
        self._count_reads = count_reads
        self._delay = delay
        self._lock = threading.RLock()
        self._stack = contextlib.ExitStack()
        self._threads: set[threading.Thread] = set()

    def __enter__(self) -> Life:
        self._threads = set(threading.enumerate())
        number, start = next(_LIVES), process.start_of

        def process_start(pid: int) -> float | None:
            found = start(pid)
            return found + 10.0 * number if found and pid == os.getpid() else found

        opened = self._opener(builtins.open)
        patches: list[tuple[Any, str, Any]] = [
            (builtins, "open", opened),
            (io, "open", opened),
            # By path and not by descriptor, so that each deletion of a tree is seen.
            (shutil, "_use_fd_functions", False),
            (process, "start_of", process_start),
            (time, "sleep", lambda seconds, real=time.sleep: real(min(seconds, _LONGEST_SLEEP))),
            (logging, "raiseExceptions", False),
            (threading, "excepthook", self._quiet(threading.excepthook)),
            (os, "open", self._low_level_open(os.open)),
            (os, "write", self._low_level_write(os.write)),
        ]
        for name in (*_WRITES, *_READS):
            patches.append((os, name, self._watched(name, getattr(os, name))))
        # Counted and not done: no life here ends by a power cut, and it is what takes the time.
        patches += [(os, name, self._watched("fsync", lambda _: None)) for name in _SYNCS]
        for owner, name, value in patches:
            self._stack.enter_context(mock.patch.object(owner, name, value))
        return self

    def __exit__(self, *_: object) -> None:
        try:
            # Still on this life's disk: a thread of a dead life must not meet a working one.
            for thread in set(threading.enumerate()) - self._threads:
                thread.join(20)
                assert not thread.is_alive(), f"thread {thread.name} outlived its life"
        finally:
            self._stack.close()

    def inside(self, path: Any) -> str | None:
        """The absolute path of what a call is about, if it is below the watched directory."""
        if isinstance(path, int):
            try:
                path = os.readlink(f"/proc/self/fd/{path}")
            except OSError:
                return None
        text = os.path.abspath(os.fsdecode(path))
        return text if text == self.root or text.startswith(self.root + "/") else None

    def perform(
        self,
        operation: Operation,
        action: Callable[[], Any],
        torn: Callable[[], Any] | None = None,
        *,
        reads: bool = False,
    ) -> Any:
        """Do an operation, or fail at it as was asked for."""
        with self._lock:
            if self.dead:
                raise Killed
            if reads and not self._count_reads:
                return action()
            self.operations.append(operation)
            failing = self._fails(operation)
            if failing and self.trouble is not None:
                self._strike(self.trouble, operation, action, torn)
        if self._delay:
            time.sleep(self._delay)
        return action()

    def _fails(self, operation: Operation) -> bool:
        trouble, number = self.trouble, len(self.operations)
        if trouble is None or number < trouble.at:
            return False
        return number == trouble.at or (trouble.sticky and operation.kind not in trouble.spared)

    def _strike(
        self,
        trouble: Trouble,
        operation: Operation,
        action: Callable[[], Any],
        torn: Callable[[], Any] | None,
    ) -> None:
        self.struck = True
        # What the operation itself would have raised nobody lives to see.
        with contextlib.suppress(OSError):
            if trouble.mode == "torn" and torn is not None:
                torn()
            elif trouble.mode == "after":
                done = action()
                if operation.kind == "open":
                    done.close()
                elif operation.kind == "open descriptor":
                    os.close(done)
        if trouble.error is not None:
            raise trouble.error(operation.path)
        self.dead = True
        raise Killed

    def _watched(self, kind: str, real: Callable[..., Any]) -> Callable[..., Any]:
        position = 1 if kind in _TARGET_SECOND else 0

        def call(*args: Any, **kwargs: Any) -> Any:
            path = self.inside(args[position]) if len(args) > position else None
            if path is None:
                return real(*args, **kwargs)
            reads = kind in _READS
            return self.perform(Operation(kind, path), lambda: real(*args, **kwargs), reads=reads)

        return call

    def _low_level_open(self, real: Callable[..., int]) -> Callable[..., int]:
        def call(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
            inside = self.inside(path)
            if inside is None:
                return real(path, flags, *args, **kwargs)
            reads = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC) == 0
            (self.read if reads else self.written).add(inside)
            operation = Operation("open descriptor", inside)
            return self.perform(operation, lambda: real(path, flags, *args, **kwargs), reads=reads)

        return call

    def _low_level_write(self, real: Callable[..., int]) -> Callable[..., int]:
        def call(descriptor: int, data: Any) -> int:
            inside = self.inside(descriptor)
            if inside is None:
                return real(descriptor, data)
            half = memoryview(data)[: len(data) // 2]
            return self.perform(
                Operation("write", inside),
                lambda: real(descriptor, data),
                lambda: real(descriptor, half),
            )

        return call

    def _opener(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(file: Any, mode: str = "r", buffering: int = -1, *args: Any, **kwargs: Any) -> Any:
            path = self.inside(file)
            if path is None or isinstance(file, int):
                return real(file, mode, buffering, *args, **kwargs)
            reads = not set(mode) & set("wax+")
            (self.read if reads else self.written).add(path)
            raw = mode.replace("b", "").replace("t", "") + "b"
            opened = self.perform(
                Operation("open", path), lambda: real(file, raw, buffering=0), reads=reads
            )
            watched = _File(self, path, opened)
            if "b" in mode:
                return watched
            return io.TextIOWrapper(watched, *args, **kwargs, write_through=True)  # type: ignore

        return call

    def _quiet(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def hook(arguments: Any) -> None:
            if not issubclass(arguments.exc_type, Killed):
                real(arguments)

        return hook


class _File(io.RawIOBase):
    """An open file whose reads and writes are operations of a life; it buffers nothing.

    So a write that returned is in the file, as far as a later life can tell, and a dead life has
    nothing left to flush.
    """

    def __init__(self, life: Life, path: str, raw: Any) -> None:
        super().__init__()
        self._life, self._path, self._raw = life, path, raw

    def write(self, data: Any) -> int:
        half = memoryview(data)[: len(data) // 2]
        return self._life.perform(
            Operation("write", self._path),
            lambda: self._raw.write(data),
            lambda: self._raw.write(half),
        )

    def read(self, size: int | None = -1) -> bytes:
        return self._life.perform(
            Operation("read", self._path), lambda: self._raw.read(size), reads=True
        )

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._raw.close()
        super().close()

    def readable(self) -> bool:
        return self._raw.readable()

    def writable(self) -> bool:
        return self._raw.writable()

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._raw.seek(offset, whence)

    def tell(self) -> int:
        return self._raw.tell()

    def fileno(self) -> int:
        return self._raw.fileno()


def attempts_written(life: Life) -> set[str]:
    """`<step directory>/attempts/<attempt>` of every attempt a life wrote into."""
    return {"/".join(parts[:3]) for parts in _below(life, life.written) if parts[1] == "attempts"}


def _below(life: Life, paths: set[str]) -> Iterator[list[str]]:
    for path in paths:
        parts = path.removeprefix(life.root + "/").split("/")
        if len(parts) > 3:
            yield parts


def data_read(life: Life) -> set[str]:
    """Paths, relative to the watched store, of attempt data a life opened for reading."""
    return {"/".join(parts) for parts in _below(life, life.read) if parts[1] == "attempts"}


def data_written(life: Life) -> set[str]:
    """Paths, relative to the watched store, of attempt data a life opened for writing."""
    return {"/".join(parts) for parts in _below(life, life.written) if parts[1] == "attempts"}
