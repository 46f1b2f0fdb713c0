"""The exceptions of this project.

PonenteError
├── InputError       the user's data, configuration or request is refused; never retried
│   └── UsageError   a command line with an unknown verb, flag or value: exit status 2
├── CorruptOutput    the bytes of a finished output differ from the recorded ones
├── StorageError     a store violated the guarantees that the commit protocol needs
│   └── StoreUnavailable  every retry failed; a new attempt may succeed
├── WorkerLost       a process that the step depended on died; the step can be retried
│   ├── Preempted    a machine was taken away, with or without a SIGTERM: uses no try
│   └── ResourcesUnavailable       the requested hardware is in use
├── Cancelled          the user asked to stop; finished work is kept
└── StepFailed       a step ended without an output (carries the log path and the cause)

A message has one line: what was expected, what was found, where, and what to do about it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable

NEAR = 0.7  # similarity from which a known name is suggested for a wrong one
_DECORATION = re.compile(r"\x1b\[[0-9;]*m|[\^~]{2,}")  # of Ray's and Python's tracebacks


class PonenteError(Exception):
    """Base of every error this project raises on purpose."""


class InputError(PonenteError):
    """The user's data, configuration or request cannot be used; a retry would not help."""


class UsageError(InputError):
    """The command line has a verb, flag or value that does not exist."""


class CorruptOutput(PonenteError):
    """A finished output's bytes differ from its manifest: missing, truncated or changed."""


class StorageError(PonenteError):
    """The store refused an operation, or lost or truncated an object."""


class StoreUnavailable(StorageError, OSError):
    """Every retry of a store operation failed; also an `OSError`, so that the step is retried."""


class WorkerLost(PonenteError):
    """A process that the step depended on died; the step can be retried."""


class Preempted(WorkerLost):
    """A machine of the step was taken away; the next attempt resumes from what was saved."""


class ResourcesUnavailable(WorkerLost):
    """The hardware that the step requested is in use; the step can be retried."""


class Cancelled(PonenteError):
    """The user asked to stop; finished steps and shards are kept."""


class StepFailed(PonenteError):
    """A step of the graph ended without an output."""


def text_of(error: BaseException, most: int = 300) -> str:
    return " ".join(_DECORATION.sub("", str(error)).split())[:most]


def one_line(error: BaseException) -> str:
    """An error in one line; its type is named unless its text says all."""
    text = text_of(error, sys.maxsize)
    if isinstance(error, InputError | CorruptOutput | WorkerLost | Cancelled):
        return text
    return f"{type(error).__name__}: {text}"


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """The error message for an unknown name: suggests the nearest known one, or lists them all."""
    import difflib  # imported here because it would add 5 % to the engine's import time

    known = list(known)
    near = difflib.get_close_matches(name, known, 1, NEAR)
    hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(known)}"
    return f"no {what} {name!r}; {hint}"
