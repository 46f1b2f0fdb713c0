"""Each attempt's output, kept: logging, stdout and stderr, also of C++ libraries."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import ClassVar

from pipeline.errors import PonenteError
from pipeline.store import storage

_OURS = ("ponente", "data", "models", "steps", "training")  # loggers whose information is kept
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


@contextlib.contextmanager
def capture(url: str, *, redirect: bool) -> Iterator[None]:
    """Send this process's log records to the object `url` while the block runs.

    Args:
        url: the log; written as it grows on a local disk, uploaded at the end elsewhere.
        redirect: also send file descriptors 1 and 2 there (a worker's, not a terminal's).
    """
    local = storage.is_local(url)
    path = storage.local_path(url) if local else tempfile.mkstemp(suffix=".log")[1]
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "a", buffering=1) as file, contextlib.ExitStack() as stack:
        handler = logging.StreamHandler(file)
        handler.setFormatter(logging.Formatter(_FORMAT))
        stack.enter_context(_attached(handler))
        if redirect:
            stack.enter_context(_redirected(file.fileno()))
        yield
    if not local:
        with open(path, "rb") as done:
            text = done.read()
        os.unlink(path)
        try:
            storage.write_atomic(url, text)
        except (OSError, PonenteError) as error:
            # The step has ended; how it ended does not depend on its log.
            logging.getLogger("ponente").warning("%s: the log was not kept: %s", url, error)


@contextlib.contextmanager
def _attached(handler: logging.Handler) -> Iterator[None]:
    root = logging.getLogger()
    root.addHandler(handler)
    _Informative.enter()
    try:
        yield
    finally:
        _Informative.leave()
        root.removeHandler(handler)


class _Informative:
    """This project's loggers at INFO while any attempt runs: several threads may each have one."""

    _lock = threading.Lock()
    _attempts = 0
    _levels: ClassVar[dict[str, int]] = {}

    @classmethod
    def enter(cls) -> None:
        with cls._lock:
            cls._attempts += 1
            if cls._attempts == 1:
                cls._levels = {name: logging.getLogger(name).level for name in _OURS}
                for name in _OURS:
                    logging.getLogger(name).setLevel(logging.INFO)

    @classmethod
    def leave(cls) -> None:
        with cls._lock:
            cls._attempts -= 1
            if not cls._attempts:
                for name, level in cls._levels.items():
                    logging.getLogger(name).setLevel(level)


@contextlib.contextmanager
def _redirected(target: int) -> Iterator[None]:
    sys.stdout.flush()
    sys.stderr.flush()
    saved = {descriptor: os.dup(descriptor) for descriptor in (1, 2)}
    try:
        for descriptor in saved:
            os.dup2(target, descriptor)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor, copy in saved.items():
            os.dup2(copy, descriptor)
            os.close(copy)
