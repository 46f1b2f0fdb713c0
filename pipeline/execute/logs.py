"""The logs of an attempt's processes, written while they run: logging, stdout and stderr."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import logging
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator

from pipeline.events import Emit
from pipeline.execute.screen import Copies, Log, Screen
from pipeline.graph.module_names import NEIGHBOURS
from pipeline.store import storage
from pipeline.store.append import Appender
from pipeline.store.manifest import PROCESS_LOGS

NAME = "log.txt"  # log of the process that executes the step
_ENGINE = "ponente"
_SHOWN = "%(levelname)s %(name)s: %(message)s"
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


@contextlib.contextmanager
def capture(
    url: str,
    *,
    redirect: bool,
    packages: Iterable[str] = (),
    show: Emit | None = None,
) -> Iterator[None]:
    """Send this process's log records, stdout and stderr to the log `url` while the block runs.

    That includes what C libraries and child processes write to descriptors 1 and 2.
    """
    with contextlib.ExitStack() as stack:
        path = stack.enter_context(Appender(url)).path
        log = stack.enter_context(Log(path))
        handler = logging.StreamHandler(log)
        handler.setFormatter(logging.Formatter(_FORMAT))
        stack.enter_context(_attached(handler, {_ENGINE, *packages}))
        screen = None
        if show is not None:
            screen = stack.enter_context(Screen(show, None if redirect else log.unseen))
            stack.enter_context(_attached(_of_users(screen, packages), set()))
        if redirect or screen is not None:
            stack.enter_context(_redirected(path, (1, 2) if redirect else _free()))
        stack.enter_context(_printed(log, screen, redirect))
        yield


def processes(attempt: str) -> list[str]:
    """URLs of the logs in an attempt's directory: the step's own, then those of a gang."""
    names = storage.list_names(attempt)
    found = [storage.join(attempt, NAME)] if NAME in names else []
    if PROCESS_LOGS in names:
        directory = storage.join(attempt, PROCESS_LOGS)
        found += [storage.join(directory, name) for name in storage.list_names(directory)]
    return found


def _of_users(screen: Screen, packages: Iterable[str]) -> logging.Handler:
    """A handler that shows the records of packages other than the engine and its neighbours."""
    users = set(packages) - NEIGHBOURS
    handler = logging.StreamHandler(screen)
    handler.setFormatter(logging.Formatter(_SHOWN))
    handler.addFilter(lambda record: record.name.partition(".")[0] in users)
    return handler


@contextlib.contextmanager
def _printed(file: Log, screen: Screen | None, redirect: bool) -> Iterator[None]:
    """Copy what Python prints to the file, and from a worker to the screen."""
    before = sys.stdout, sys.stderr
    others = () if screen is None else (screen,)
    copies = [Copies(file, *((file, *others) if redirect else (stream, file))) for stream in before]
    sys.stdout, sys.stderr = copies
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for copy, stream in zip(copies, before, strict=True):
            copy.end(stream)


_informative: Counter[str] = Counter()  # loggers at INFO: how many attempts want it
_levels: dict[str, int] = {}  # before


@contextlib.contextmanager
def _attached(handler: logging.Handler, packages: set[str]) -> Iterator[None]:
    """Add a handler to the root logger; these loggers pass INFO records meanwhile."""
    logging.getLogger().addHandler(handler)
    for name in packages - (+_informative).keys():
        _levels[name] = logging.getLogger(name).level
        logging.getLogger(name).setLevel(logging.INFO)
    _informative.update(packages)
    try:
        yield
    finally:
        _informative.subtract(packages)
        for name in [name for name in packages if not _informative[name]]:
            logging.getLogger(name).setLevel(_levels.pop(name))
        logging.getLogger().removeHandler(handler)


def _free() -> list[int]:
    """Descriptors that Python's stdout and stderr do not write to; a run's have others."""
    taken = set()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            taken.add(stream.fileno())
    return [descriptor for descriptor in (1, 2) if descriptor not in taken]


_redirecting = threading.Lock()  # by one attempt at a time: descriptors are the process's


@contextlib.contextmanager
def _redirected(path: str, descriptors: Iterable[int]) -> Iterator[None]:
    if not _redirecting.acquire(blocking=False):
        yield
        return
    saved: dict[int, int] = {}
    crash = False
    _flush()
    try:
        target = os.open(path, os.O_WRONLY | os.O_APPEND)
        for descriptor in descriptors:
            saved[descriptor] = os.dup(descriptor)
            os.dup2(target, descriptor)
        os.close(target)
        if crash := 2 in saved and not faulthandler.is_enabled():
            faulthandler.enable(saved[2])  # the library's own last words are in the log
        yield
    finally:
        _flush()
        if crash:
            faulthandler.disable()
        for descriptor, copy in saved.items():
            os.dup2(copy, descriptor)
            os.close(copy)
        _redirecting.release()


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)
