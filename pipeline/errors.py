"""What can go wrong, as a tree.

PonenteError
├── InputError       the user's data, configuration or request is refused; never retried
│   └── UsageError   a command line that says nothing this program knows: exit status 2
├── CorruptOutput    finished bytes are not the bytes that were recorded
├── StorageError     a store did something the protocol cannot live with
│   └── StoreUnavailable  it failed again and again; a new attempt may do better
├── WorkerLost       a process the step depended on died; the step can be tried again
│   ├── Preempted    asked to stop, it saved and ended: not a failure, uses up no try
│   └── ResourcesUnavailable       the hardware it asked for is taken
├── Cancelled          the user asked to stop; what is finished is kept
└── StepFailed       a step ended without an output (carries the log path and the cause)

A message says what was expected, what was found, where, and what to do about it, in one line.
"""

from __future__ import annotations

from collections.abc import Iterable


class PonenteError(Exception):
    """Base of every error this project raises on purpose."""


class InputError(PonenteError):
    """The user's data, configuration or request cannot be used; trying again would not help."""


class UsageError(InputError):
    """The command line has a verb, flag or value that does not exist."""


class CorruptOutput(PonenteError):
    """A finished output's bytes differ from its manifest: missing, truncated or changed."""


class StorageError(PonenteError):
    """The store refused, lost or tore something."""


class StoreUnavailable(StorageError, OSError):
    """The store failed again and again; an `OSError` too, so that the step is tried again."""


class WorkerLost(PonenteError):
    """A process the step depended on died; the step can be tried again."""


class Preempted(WorkerLost):
    """The machine was taken away after the step had saved its work; the next attempt resumes."""


class ResourcesUnavailable(WorkerLost):
    """The hardware the step asked for is taken; it can be tried again."""


class Cancelled(PonenteError):
    """The user asked to stop; finished steps and shards are kept."""


class StepFailed(PonenteError):
    """A step of the graph ended without an output."""


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """A message about a name that does not exist, with the nearest that does."""
    import difflib  # only for messages: it is 5 % of what importing the engine costs

    known = list(known)
    near = difflib.get_close_matches(name, known, 1, 0.6)
    hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(known)}"
    return f"no {what} {name!r}; {hint}"
